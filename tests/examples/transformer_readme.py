"""The output in examples/transformer/README.md, from what was built.

python -m tests.examples.transformer_readme FOLDER

FOLDER has the built artifacts: bazel-bin/examples/transformer. README is rewritten with what the commands print now.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.building import ROOT, checked, stagec, write_specs

FOLDER = "examples/transformer"
README = ROOT / FOLDER / "README.md"
SERVING = '{ embedding = "P(model)", columns = "P(None, None, model)", rows = "P(None, model)", norms = "P()" }'
TRAINING = (
    '{ embedding = "P(model, data)", columns = "P(None, data, model)", rows = "P(None, model, data)", norms = "P()" }'
)


def rewritten(text: str, folder: Path) -> str:
    """Return README with each block of output as it is now."""

    def block(match: re.Match[str]) -> str:
        name = re.search(rf"inspect bazel-bin/{FOLDER}/(\S+) -->", match[1])
        output = checked("inspect", folder / name[1]) if name else over_a_limit()
        return f"{match[1]}\n```text\n{output}```"

    return re.sub(r"^(<!-- output of: [^\n]* -->)\n```text\n.*?```", block, text, flags=re.MULTILINE | re.DOTALL)


def over_a_limit() -> str:
    """Return what compiling decode for a CPU says when its weights are split as for training."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        for name in ("model.py", "avals.py", "transformer.toml"):
            (out / FOLDER).mkdir(parents=True, exist_ok=True)
            (out / FOLDER / name).write_text((ROOT / FOLDER / name).read_text("utf-8").replace(SERVING, TRAINING))
        write_specs(f"{FOLDER}/transformer.toml", out, out)
        stem, exported = out / "transformer.decode.cpu-avx2", out / "transformer.decode.exported"
        words: list[str | Path] = ["--output", exported, "--description", f"{exported}.json", "--import-root", out]
        checked("action", "export", "--spec", out / "transformer.decode.spec", *words, cwd=out)
        words = ["--exported", exported, "--output", f"{stem}.xla", "--description", f"{stem}.json"]
        return stagec("action", "compile", "--spec", f"{stem}.spec", *words, cwd=out).stderr


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text("utf-8"), Path(sys.argv[1])), "utf-8")
