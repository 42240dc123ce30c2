"""Other weights for a model of a server, while it runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stagec.core.data import paths, strict_json
from stagec.core.messages.errors import mistake
from stagec.core.messages.refusal import Refusal
from stagec.core.trees import json_shapes
from stagec.loader.bundle import Bundle
from stagec_serve.batching import Batcher
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError

if TYPE_CHECKING:
    from stagec.trust.keys import Key

_NAME = re.compile(rf"{paths.PLAIN}\.safetensors")
_PARAMETERS = json_shapes.shape({"weights": str, "file?": str})


class Adapted(NamedTuple):
    """Models with weights of other files, by name, and the bundle that has these for each."""

    models: Mapping[str, Model]
    bundles: Mapping[str, Bundle]


def adapted(
    bundle: Bundle,
    models: Mapping[str, Model],
    files: Mapping[str, str],
    of: str | None = None,
    keys: Sequence[Key] | None = None,
) -> Adapted:
    """Return `FUNCTION.NAME` for each file and each function that binds the replaced file.

    They share the executables and equal arrays. Other arrays are mapped at the first request.
    files: by NAME. of: the file that they replace, as the manifest names it; None: the only one. keys: trusted keys;
    these must have signed them. Raises LoadError, StagecError.
    """
    bound = {
        name: {weight.partition(":")[0] for weight in model.usage.bound.values()} for name, model in models.items()
    }
    every = sorted(set().union(*bound.values()))
    if files and of not in every and (of is not None or len(every) != 1):
        what = f"--adapter-of is {of}" if of else "--adapter needs --adapter-of"
        raise mistake(f"{what}: the files are {', '.join(every) or 'none'}", "name one of them")
    chosen: dict[str, Model] = {}
    bundles: dict[str, Bundle] = {}
    for name, path in files.items():
        view = bundle.with_weights(path, of, keys=keys)
        for function, model in models.items():
            if (of or every[0]) in bound[function]:
                chosen[f"{function}.{name}"] = model.of(view, f"{function}.{name}", warm=False)
                bundles[f"{function}.{name}"] = view
    return Adapted(chosen, bundles)


class Swapping:
    """Loads files of weights from one folder, and from no other.

    given: the parameters of the last `load` of each model that has other weights than the bundle's, by name.
    It closes nothing that a call may use: the old data of a model is freed after its last call.
    """

    def __init__(
        self,
        bundle: Bundle,
        folder: str | Path,
        keys: Sequence[Key] | None = None,
        adapted: Mapping[str, Bundle] | None = None,
    ) -> None:
        """bundle: that of the models; adapted: that of some, by name.

        keys: who must have signed the files, as for `Bundle.with_weights`.
        """
        self._bundle, self._folder, self._keys = bundle, Path(folder).resolve(), keys
        self._bundles = dict(adapted or {})
        self.given: dict[str, Mapping[str, object]] = {}

    async def load(self, batcher: Batcher, parameters: Mapping[str, object]) -> Callable[[], None]:
        """Load the weights that a request names for a queue's model, and call it once with each bucket.

        Return what lets the queue's requests have them, from the next one on.
        parameters: "weights", the path of a file below the folder; "file", the file that it replaces, as for
        `Bundle.with_weights`. Requests run meanwhile, with the weights before. Raises RequestError ("request",
        "unavailable").
        """
        model, bundle = await asyncio.to_thread(self._loaded, batcher.model, parameters)

        def take() -> None:
            self._bundles[model.name] = bundle
            self.given[model.name] = parameters
            batcher.model = model

        return take

    def _loaded(self, model: Model, parameters: Mapping[str, object]) -> tuple[Model, Bundle]:
        try:
            _PARAMETERS(parameters)
        except ValueError as error:
            what = f'{error}; write "parameters": {{"weights": "NAME.safetensors"}}'
            raise RequestError("request", f"{model.name}: {what}") from None
        name, file = str(parameters["weights"]), parameters.get("file")
        path = self._folder / name
        if not _NAME.fullmatch(name) or not self._is_below(path):
            what = f"{strict_json.shown(name)!r} is not the path of a .safetensors file below the server's folder"
            raise RequestError("request", f"{model.name}: {what}")
        mine = sorted({weight.partition(":")[0] for weight in model.usage.bound.values()})
        if not mine or file not in (None, *mine):
            what = f"it takes its weights from {', '.join(mine)}" if mine else "no argument of it is bound to weights"
            raise RequestError("request", f"{model.name}: {what}")
        before = self._bundles.get(model.name, self._bundle)
        try:
            bundle = before.with_weights(path, None if file is None else str(file), keys=self._keys)
            return model.of(bundle), bundle
        except Refusal as error:
            raise RequestError("unavailable", f"{model.name}: {error}") from None

    def _is_below(self, path: Path) -> bool:
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # links that lead to each other
            return False
        return real.is_relative_to(self._folder) and not real.is_symlink()  # Python 3.13 leaves such links as they are
