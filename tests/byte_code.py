"""Compile modules for the Python that runs this: `byte_code.py MODULE COMPILED...`, a pair for each module.

Python compiles again what has changed: the hash of a module's source is in its byte code.
"""

import py_compile
import sys

for source, compiled in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    py_compile.compile(source, compiled, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
