"""The table of what can be wrong: a name, how it is said, and what to do about it."""

from __future__ import annotations

from typing import Dict, NamedTuple

__all__ = ["KINDS", "PATCH", "Kind"]

PATCH = "import nni_dataparallel.auto"


class Kind(NamedTuple):
    """A kind of fault."""

    title: str
    remedy: str


KINDS: Dict[str, Kind] = {
    "fails": Kind(
        "the step fails on replicas",
        "see the line: a replica knows its shard only, its outputs are joined along dimension 0 (a loss per replica: take the "
        "mean), and a loss function gets the DataParallel (the model is model.module)",
    ),
    "mixed devices": Kind(
        "tensors of two devices are mixed",
        "make it a buffer (register_buffer), which DataParallel copies to every device, or move it where it is used: "
        "tensor.to(x.device)",
    ),
    "asked for parameters": Kind(
        "a replica is asked for its parameters",
        "parameters() of a replica is empty: name the parameters (self.weight), or do it outside of forward (a penalty belongs "
        "to the loss)",
    ),
    "lost buffer": Kind(
        "buffer lost on the replicas",
        "assign in place, self.{name}.copy_(value): replica 0 shares its buffers' memory with the model, an assigned tensor "
        "dies with the replica. It then holds what the first shard gives; update it after the forward, outside of DataParallel, "
        "if the whole batch counts",
    ),
    "lost attribute": Kind(
        "attribute lost on the replicas",
        "a replica is a copy that is thrown away: return the value from forward, or count and collect outside of the model",
    ),
    "lost activation": Kind(
        "activation kept on self is lost",
        "return it from forward: DataParallel joins the replicas' parts; what stands on self dies with the replica",
    ),
    "one shard": Kind(
        "statistics of the first shard only",
        "compute it after the forward, from what DataParallel returns for the whole batch, or train with "
        "DistributedDataParallel and reduce it over the ranks",
    ),
    "shared attribute": Kind(
        "attribute that all replicas write to",
        "replicas share Python lists and dicts, and write to them from several threads in any order: return what "
        "is collected from forward",
    ),
    "state differs": Kind(
        "state differs from one device",
        "let forward depend on nothing but its input, and update the state after the forward, outside of DataParallel",
    ),
    "non-leaf": Kind(
        "copy.deepcopy(model) fails",
        "detach what is kept: self.{name} = value.detach()",
    ),
    "batch norm": Kind(
        "batch norm sees one shard",
        "each replica normalises by its own rows, and the running statistics are replica 0's: freeze it (eval()), or train with "
        "DistributedDataParallel and torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
    "loss differs": Kind(
        "loss differs from one device",
        "if nothing above explains it: forward depends on the number of rows it sees, or averages over them",
    ),
    "gradients differ": Kind(
        "gradients differ from one device",
        "follows from a difference above, or from a mean over rows inside forward",
    ),
    "parameters differ": Kind(
        "parameters differ after the step",
        "the gradients are equal, so the optimizer or a hook on its step depends on state that the replicas lost",
    ),
    "built before": Kind(
        "the model was built without the patch",
        "give diagnose() the function that builds it: some repairs take effect when a layer is wrapped",
    ),
    "dropout": Kind(
        "dropout draws per replica",
        "nothing to do: other numbers are drawn than on one device; the runs above were made without dropout",
    ),
    "random": Kind(
        "the forward draws random numbers",
        "nothing to do: what changes with the seed on one device already is not compared",
    ),
}
"""Every kind of finding, in the order in which they are shown."""
