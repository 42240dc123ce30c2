"""Show how much `stagec build` keeps, and remove what nobody has asked for since long."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.core.messages.errors import mistake

OPTIONS = {
    "[--most SIZE]": 'remove files until there is not more than this, such as "5GB"; what was used last stays',
}


def run(options: Options) -> Answer:
    from stagec.local.store import Store, default_folder

    store = Store(default_folder())
    removed = 0
    if options.most is not None:
        from stagec.manifest.values import read_bytes

        try:
            most = read_bytes(options.most)
        except ValueError:
            raise mistake(f"--most {options.most}: not a size", 'write for example "5GB"') from None
        removed = store.trim(most)
    count, size = store.usage()
    text = f"{store.folder}  {count:,} files, {size:,} bytes\n"
    text += f"removed {removed:,} bytes\n" if options.most is not None else ""
    return Answer({"folder": str(store.folder), "files": count, "bytes": size, "removed": removed}, text)
