"""Says where it runs and what it got."""

import json
import os
import sys
from pathlib import Path

import library

result = {
    "arguments": sys.argv[1:],
    "folder": str(Path.cwd()),
    "greeting": os.environ["GREETING"],
    "data": [Path(argument).read_text() for argument in sys.argv[1:] if argument.endswith("data.txt")],
    "library": library.NAME,
}
print(json.dumps(result))
