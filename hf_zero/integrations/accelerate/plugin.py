"""Wrappers of ``DeepSpeedPlugin`` and ``HfDeepSpeedConfig``: reading and completion of a
configuration, with the source of each value: files, presets, the launcher's file or command.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

from hf_zero.config import PRESETS, ZeroConfig
from hf_zero.config.accelerate_yaml import is_accelerate
from hf_zero.config.files import load_file, load_text
from hf_zero.config.keys import KEYS, OWN_AUTOS
from hf_zero.config.launched import LAUNCH_FILE, LAUNCHED_BY, WRITTEN, launch_command
from hf_zero.config.reading import AUTO, SWITCHES
from hf_zero.config.resolving import ACCUMULATION
from hf_zero.config.sourced import DICT, SourcedDict, flattened, merge
from hf_zero.deepspeed.construction import forced_config
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.parallel_sizes import move_size_alias
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

PRINTS = "steps_per_print"


def read_strictly(original: Original, self: HfDeepSpeedConfig, config_file_or_dict: object) -> None:
    """Wraps ``HfDeepSpeedConfig.__init__``: reads paths, presets and JSON with hf-zero's reader,
    and keeps the sources of the values. Raises ConfigError for what is no configuration.
    """
    if not finder.chosen():
        original(self, config_file_or_dict)
        return
    original(self, mapping_of(config_file_or_dict))
    move_size_alias(self.config)


def add_written_keys(original: Original, self: DeepSpeedPlugin) -> None:
    """Wraps ``DeepSpeedPlugin.__post_init__``: adds the launcher file's keys that Accelerate does
    not pass on to the ranks, records the source of each, keeps a written ``steps_per_print``,
    which Accelerate replaces by infinity, and leaves accumulation to the Accelerator where the
    configuration has no key of it, for which Accelerate would write 1.
    """
    value, file = self.hf_ds_config, os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    from_launcher = value is None and file == "none"
    if finder.chosen() and not from_launcher:
        self.hf_ds_config = _with_open_accumulation(file if value is None else value)
    original(self)
    if not (finder.chosen() and isinstance(self.deepspeed_config, SourcedDict)):
        return
    if PRINTS in self.deepspeed_config.written:
        self.deepspeed_config[PRINTS] = self.deepspeed_config.written[PRINTS][0]
    if from_launcher:
        merge(self.deepspeed_config, written_keys())
        move_size_alias(self.deepspeed_config)
        remember_launch(self.deepspeed_config)
    elif not hasattr(value, "config"):
        # with a ``config`` it is the Trainer's, which sets its own filler
        self.deepspeed_config.filler = "Accelerate"


def _with_open_accumulation(given: object) -> object:
    """Return the configuration ``given``, in any form that a ZeroConfig takes, as Accelerate's
    object, with accumulation left open unless it is written; "none", Accelerate's word, unchanged.
    Accelerate drops forms other than a dict and a string in silence.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    if given == "none":
        return given
    config = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given)
    config.config.setdefault(ACCUMULATION, AUTO)
    return config


def leave_own_autos(
    original: Original,
    self: DeepSpeedPlugin,
    ds_key_long: str,
    mismatches: list[str] | None = None,
    must_match: bool = True,
    **kwargs: object,
) -> None:
    """Wraps ``DeepSpeedPlugin.fill_match``: keeps "auto" where it is a value of hf-zero."""
    if not (finder.chosen() and ds_key_long in OWN_AUTOS and ds_key_long not in kwargs):
        original(self, ds_key_long, mismatches, must_match, **kwargs)


@contextmanager
def leave_models_whole(
    original: Original, self: DeepSpeedPlugin, enable: bool = False
) -> Iterator[None]:
    """Wraps ``DeepSpeedPlugin.zero3_init_context_manager``: models of transformers constructed
    under ``enable=False`` stay whole.
    """
    with original(self, enable):
        whole = ZeroConfig(stage=0) if finder.chosen() and not enable else forced_config.get()
        token = forced_config.set(whole)
        try:
            yield
        finally:
            forced_config.reset(token)


def written_keys() -> dict[str, object]:
    """Return the keys that ``prepare_ranks`` (launch.py), from the launcher's file, or ``hf-zero
    launch --set`` passed on to this rank.
    """
    return dict(json.loads(os.environ.get(WRITTEN, "{}")))


def mapping_of(value: object) -> object:
    """Convert the argument of ``HfDeepSpeedConfig``, which copies it, to a mapping with sources.
    Raises ConfigError for an invalid configuration.
    """
    if isinstance(value, Mapping):
        return _sourced(value, DICT)
    if not _is_path_or_text(value):
        # raises ConfigError, listing the presets, unless it is a preset or a ZeroConfig
        return ZeroConfig.coerce(value, allow_auto=True, foreign=True).to_dict()
    text = load_text(value) if isinstance(value, str) and not os.path.exists(value) else None
    mapping = load_file(value) if text is None else text
    label = f"config file {value}" if text is None else "config string"
    if is_accelerate(mapping) or "stage" in mapping:
        return ZeroConfig.from_dict(mapping, source=label, allow_auto=True, foreign=True).to_dict()
    return _sourced(mapping, label)


def _is_path_or_text(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether ``value`` is the path or the text of a configuration, not a preset's name."""
    if not isinstance(value, str):
        return isinstance(value, os.PathLike)
    looks_so = os.path.exists(value) or not {os.sep, ".", "{", "="}.isdisjoint(value)
    return value not in PRESETS and looks_so


def _sourced(mapping: Mapping[str, object], label: str) -> SourcedDict:
    """Return ``mapping`` with its source. Raises ConfigError for a misspelt section or key if it
    has no section ``zero_optimization``, which Accelerate refuses without saying what it has.
    """
    if not isinstance(mapping.get("zero_optimization"), Mapping):
        ZeroConfig.from_dict(mapping, source=label, allow_auto=True, foreign=True)
    return SourcedDict.wrap(mapping, label)


def remember_launch(config: SourcedDict) -> None:
    """Record the sources of values of ``config``, built from the launcher's variables."""
    file = os.environ.get(LAUNCH_FILE)
    written = {}
    if file and os.path.isfile(file):
        written = dict(ZeroConfig.from_file(file, allow_auto=True, foreign=True).to_dict().written)
    by = os.environ.get(LAUNCHED_BY) or (
        "accelerate launch"
        if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ
        else "DeepSpeedPlugin"
    )
    for path, value in flattened(config):
        usual = path not in KEYS or KEYS[path].changes_nothing(value)
        if not usual and written.get(path, (None, ""))[0] != value:
            written[path] = (value, by)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if launch_command() and precision in SWITCHES:  # which Accelerate writes into config later
        written.setdefault(f"{precision}.enabled", (True, by))
    config.remember(written, "Accelerate")
