"""``import nni_dataparallel.auto``: patch NNI now, or as soon as a script imports its compressors.

Place the line before or after ``import nni``, it does not matter. What cannot be patched is said in
a warning, and the script goes on with stock NNI.
"""

from .startup import start

start()
