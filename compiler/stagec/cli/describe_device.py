"""Describe the GPU of this machine, for a target."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, write_whole
from stagec.core.messages.errors import mistake

OPTIONS = {
    "[--output OUTPUT]": "write the description to this file instead of stdout",
}


def run(options: Options) -> Answer:
    from stagec.backends.compilation import CannotCompile
    from stagec.backends.gpu import descriptions, local_gpus

    try:
        properties = descriptions.properties(local_gpus.describe_device())
    except CannotCompile as error:
        raise mistake(str(error), error.write) from error
    text = descriptions.as_toml(properties)
    if options.output:
        write_whole(options.output, text.encode())
    return Answer(properties, "" if options.output else text)
