"""``import nni_dataparallel.auto``: patch NNI now, or as soon as a script imports it.

Place the line before or after ``import nni``, it does not matter. What cannot be patched is said in
a warning, and the script goes on with stock NNI.
"""

from .api import arm

arm()
