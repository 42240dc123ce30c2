"""The models of one bundle, and other weights for them, at a server's start and while it runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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


class Repository:
    """The models of a bundle, loaded. It gives them weights from the files of one folder, and from no other.

    batchers: of the models by name. left_out: why other functions of the bundle are not offered, by name.
    given: the parameters of the last `load` of each model that has other weights than the bundle's, by name.
    unloaded: models that a client has unloaded. users: requests under way, and states of sequences.
    replaced: whether another one is offered instead; then it is closed when it has no users. It closes nothing that a
    call may use: the old data of a model is freed after its last call.
    """

    def __init__(
        self,
        bundle: Bundle | None = None,
        left_out: Mapping[str, str] | None = None,
        folder: str | Path = "",
        keys: Sequence[Key] | None = None,
    ) -> None:
        """bundle: that of the models. keys: who must have signed the files, as for `Bundle.with_weights`."""
        self.batchers: Mapping[str, Batcher] = {}
        self.left_out, self.unloaded, self.users, self.replaced = left_out or {}, set[str](), 0, False
        self.given: dict[str, Mapping[str, object]] = {}
        self._folder, self._keys = Path(folder).resolve(), keys
        self._bundles = {"": bundle} if bundle else {}  # by the model that has its weights; "": all others

    def enter(self) -> None:
        """Count one more user."""
        self.users += 1

    def leave(self, users: int = 1) -> None:
        """Count one less, and unload the bundle if nobody needs it any more."""
        self.users -= users
        if self.replaced and not self.users:
            self.close()

    def close(self) -> None:
        """Unload the bundle."""
        for each in self._bundles.values():
            each.close()

    def adapted(self, models: Mapping[str, Model], files: Mapping[str, str], of: str | None = None) -> dict[str, Model]:
        """Return `FUNCTION.NAME` for each file and each function that binds the replaced file.

        They share the executables and equal arrays. Other arrays are mapped at the first request.
        files: by NAME. of: the file that they replace, as the manifest names it; None: the only one. Raises LoadError,
        StagecError.
        """
        every = sorted({file for model in models.values() for file in _files(model)})
        if files and of not in every and (of is not None or len(every) != 1):
            what = f"--adapter-of is {of}" if of else "--adapter needs --adapter-of"
            raise mistake(f"{what}: the files are {', '.join(every) or 'none'}", "name one of them")
        chosen: dict[str, Model] = {}
        for name, path in files.items():
            view = self._bundles[""].with_weights(path, of, keys=self._keys)
            for model in models.values():
                if (of or every[0]) in _files(model):
                    adapter = chosen[f"{model.name}.{name}"] = model.of(view, f"{model.name}.{name}", warm=False)
                    self._bundles[adapter.name] = view
        return chosen

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
        path, mine = self._folder / name, sorted(_files(model))
        if not _NAME.fullmatch(name) or not self._is_below(path):
            what = f"{strict_json.shown(name)!r} is not the path of a .safetensors file below the server's folder"
            raise RequestError("request", f"{model.name}: {what}")
        if not mine or file not in (None, *mine):
            what = f"it takes its weights from {', '.join(mine)}" if mine else "no argument of it is bound to weights"
            raise RequestError("request", f"{model.name}: {what}")
        try:
            before = self._bundles.get(model.name, self._bundles[""])
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


def _files(model: Model) -> set[str]:
    """Return the files of weights that a model binds."""
    return {weight.partition(":")[0] for weight in model.usage.bound.values()}
