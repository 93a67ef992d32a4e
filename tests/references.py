"""Where stock NNI is wrong on one device already, the least change that makes it the reference.

* LSQ of 2.5 and later quantises ``weight.data``, so that no gradient reaches the weight (2.3 and 2.4 train it).
* ObserverQuantizer of 2.5 and later puts the float weight back in every forward after ``compress()`` (2.4 does not).
"""

from __future__ import annotations

from typing import Any

from cases import is_modern

from nni_dataparallel.fixes import installed_release

_FIXED = ("_wrap_modules", "update_calibration_config")


def is_stock(quantizer_class: Any) -> bool:
    """Whether no fix is at work in this class: neither a fixed subclass nor a patched stock class."""
    return not any(hasattr(vars(base).get(name), "__nni_dataparallel__") for base in quantizer_class.__mro__ for name in _FIXED)


def reference_class(stock: Any) -> Any:
    """``stock``, or a subclass of it that does what the releases before 2.5 do."""
    if not is_modern(installed_release()):
        return stock
    return {"LsqQuantizer": _lsq, "ObserverQuantizer": _observer}.get(stock.__name__, lambda same: same)(stock)


def _lsq(stock: Any) -> Any:
    class Reference(stock):  # type: ignore[misc]
        def quantize_weight(self, wrapper: Any, **kwargs: Any) -> Any:
            module = wrapper.module
            weight = module.weight if wrapper.bn_module is not None else module.old_weight
            module.weight = self.quantize(weight, module.weight_scale, module.weight_qmin, module.weight_qmax)
            return module.weight

    return Reference


def _observer(stock: Any) -> Any:
    class Reference(stock):  # type: ignore[misc]
        def compress(self) -> Any:
            model = super().compress()
            for wrapper in self.get_modules_wrapper():
                if "weight" in wrapper.config["quant_types"]:
                    wrapper.module.old_weight.data = wrapper.module.weight.detach().clone()
            return model

    return Reference
