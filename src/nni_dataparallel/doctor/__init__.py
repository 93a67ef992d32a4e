"""``python -m nni_dataparallel doctor``: what DataParallel does to a model, and what of it the patch repairs."""

from __future__ import annotations

from .diagnosis import Diagnosis
from .examination import diagnose
from .findings import Finding
from .subject import DoctorError

__all__ = ["Diagnosis", "DoctorError", "Finding", "diagnose"]
