"""The distillers of NNI 3.0: a teacher in DataParallel or DDP, and copies while a hidden state is held.

That the hidden states of all replicas are joined is the wrapper's business (``views``).
"""

from __future__ import annotations

import copy as copying
from typing import Any, Callable, Dict

from ..given import PREFIX, described, kind_of, users_model

__all__ = ["copy_without_graph", "register_teacher_wrappers"]


def register_teacher_wrappers(stock: Callable[..., Any], self: Any) -> Any:
    """``TeacherModelBasedDistiller._register_teacher_wrappers``: find the layers of a teacher in DataParallel or DDP.

    Links may carry the prefix ``module.`` or not, as those have that follow from the names of a student in
    them. ``teacher_predict`` gets the teacher as it was given.
    """
    given = self.teacher_model
    teacher = users_model(given)
    names = {name for name, _ in teacher.named_modules()}

    def plain(link: str) -> str:
        return link[len(PREFIX) :] if link not in names and link.startswith(PREFIX) else link

    for spaces in self._target_spaces.values():
        for space in spaces.values():
            space.link = [plain(link) for link in space.link]
    self.teacher_model = teacher
    try:
        return stock(self)
    except KeyError as error:
        if error.args[0] in names:
            raise
        raise KeyError(
            f"{type(self).__name__}: {error.args[0]!r} in `link` is no layer of the teacher {kind_of(teacher)}, whose layers are: "
            f"{described(teacher)}"
        ) from error
    finally:
        self.teacher_model = given


def copy_without_graph(stock: None, self: Any, memo: Dict[int, Any]) -> Any:
    """``DistillationTargetSpace.__deepcopy__``: the copy's hidden states have the values, not the graph that led to them.

    A tensor with a graph cannot be copied, and the graph is the original's.
    """
    own = copying.copy(self)
    memo[id(self)] = own
    held = {id(state): state.detach().clone() for state in self._buffer}
    memo.update(held)
    own.__dict__.update({name: copying.deepcopy(value, memo) for name, value in self.__dict__.items()})
    return own
