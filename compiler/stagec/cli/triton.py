"""Write a model repository for Triton, whose Python backend runs the functions of a bundle."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.cli.options import value

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "folder": "the folder to write: it is not there yet, or is empty",
    "[--delay MS]": value("how long a request waits for others (default: 2 ms)", 2, float),
}


def run(options: Options) -> Answer:
    from pathlib import Path

    from stagec.bundle.archive import Archive
    from stagec.core.telling.errors import Problem, StagecError
    from stagec.loader.serving import load
    from stagec.serving import server, triton

    folder = Path(options.folder)
    bundle = load(options.bundle, policy="executable_only")
    models, left_out = server.models_of(bundle, "batch")
    if "weights_files" in Archive(options.bundle).index:
        write = "bind weights that are in the bundle"
        raise StagecError(Problem(options.bundle, "", "its weights are beside it, where Triton has no place", write))
    try:
        if folder.exists() and any(folder.iterdir()):
            raise StagecError(Problem(options.folder, "", "the folder is not empty", "give another one"))
        left_out |= triton.write(options.bundle, models, folder, options.delay / 1000)
    except OSError as error:
        raise StagecError(Problem(options.folder, "", f"cannot be written: {error.strerror}")) from error
    names = [name for name in models if name not in left_out]
    lines = [*names, *(f"{name}: left out: {why}" for name, why in left_out.items())]
    value = {"folder": options.folder, "models": names, "left_out": left_out}
    return Answer(value, "".join(f"{line}\n" for line in lines))
