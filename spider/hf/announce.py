"""Classes for transformers after a plain ``import spider``, which imports neither that nor torch.

transformers has no entry points for models: a class is known once ``AutoConfig.register`` was called. So
whichever is imported first waits for the other: a finder here watches for transformers' registry, takes
itself off as that is imported, and has `spider.hf.registered` imported behind it. That registers only the
configuration, for transformers is still being imported; model and tokenizer follow as the first configuration
is made, which is what every ``Auto...`` class begins with.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

log = logging.getLogger(__name__)

_REGISTRY = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Register now, where transformers' registry is there, else as soon as it is."""
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(one, _Watcher) for one in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register() -> None:
    try:
        import_module("spider.hf.registered")
    except ImportError as error:  # whoever imports transformers may want something else of it
        log.warning("transformers will not know Spider's models, they need its version 5 (%s)", error)


class _Watcher(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010
        return spec
