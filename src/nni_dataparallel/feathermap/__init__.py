"""Structured multi-hashing with quantised factors: all weights of a model from two small matrices.

After phelps-matthew/FeatherMap and Eban et al., "Structured Multi-Hashing for Model Compression", CVPR 2020.
"""

from __future__ import annotations

from .factors import Int8Factor
from .net import FeatherNet
from .report import CompressionReport

__all__ = ["CompressionReport", "FeatherNet", "Int8Factor"]
