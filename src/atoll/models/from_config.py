"""A `transformers` config -> its causal language model. A config is data: it names no code or file.

Owns which keys and values such a config may hold. The library is optional and loaded on first use;
only classes it ships itself are built.
"""

import dataclasses
import importlib
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from atoll.errors import AtollError, ConfigError
from atoll.models import construction
from atoll.models.construction import short

NAME = "transformers"
KEYS = ("config", "attention", "version")
# Fixed, because what the library would choose depends on the machine.
ATTENTION = ("sdpa", "eager")
# Keys that point to code, files, names on a hub or another number format; the way out for each.
_CODE = "a run's model is data; a worker gives its own code with --model module:factory"
_WAYS_OUT: Mapping[str, str] = {
    "auto_map trust_remote_code code_revision custom_pipelines": _CODE,
    "name_or_path _name_or_path _commit_hash pretrained_model_name_or_path": (
        "weights come from the coordinator, which takes a file by model.start_from"
    ),
    "quantization_config dtype torch_dtype": (
        "a run's weights are float32; set inner.precision for the passes"
    ),
    "attn_implementation _attn_implementation": "set model.attention",
    "experts_implementation _experts_implementation": "leave it out",
}
REFUSED = {key: way_out for keys, way_out in _WAYS_OUT.items() for key in keys.split()}
# What draws at random while training: an island draws nothing, so that weights and rows fix the
# loss.
_RANDOM = re.compile("drop|jitter")
# Lists as long as these are made before any module is.
_DEPTH = re.compile("layer|depth")
MAX_DEPTH_VALUE = 1 << 12
MAX_WHOLE_NUMBER = 1 << 40
MAX_ENTRIES = 1 << 16
MAX_NESTING = 4
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
# Generation alone uses them, and a padding token's row would get no gradient.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The library looks its classes up in tables that it fills meanwhile: one thread at a time.
_BUILDING = threading.Lock()


def on_meta(definition: Mapping[str, object]) -> nn.Module:
    """The model without storage, within the limits on size."""
    limits, nowhere = construction.bounded(), torch.device("meta")
    model = _built(definition, limits, nowhere, construction.NoInit())
    construction.check_buffers(model)
    return model


def build(definition: Mapping[str, object]) -> nn.Module:
    """The model on the CPU with its buffers computed and its parameters undefined.

    Made by the constructor itself and not from the one on meta by `to_empty`, which would lose
    tied weights and every buffer that is not in a checkpoint (rotary frequencies).
    """
    on_meta(definition)  # within the limits, before anything is allocated
    _same_version(definition)
    return _built(definition, construction.own_randomness(0), construction.NoInit())


def hollow(definition: Mapping[str, object]) -> nn.Module:
    """The model with its buffers computed on the CPU and its parameters on the meta device."""
    on_meta(definition)  # within the limits, before anything is allocated
    _same_version(definition)
    own, empty = construction.own_randomness(0), construction.without_storage()
    return _built(definition, own, construction.NoInit(), empty)


def initialized(definition: Mapping[str, object], *, seed: int) -> nn.Module:
    """The model on the CPU with the initial weights its own architecture prescribes."""
    on_meta(definition)
    return _built(definition, construction.own_randomness(seed))


def longest(definition: Mapping[str, object]) -> int | None:
    """How many tokens the model reads at most; None where its config does not say."""
    config, _ = _config(definition)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def version() -> str:
    """The version of the library that builds models here."""
    return str(_library("transformers").__version__)


def _config(definition: Mapping[str, object]) -> tuple[Any, str]:
    attention = definition.get("attention", ATTENTION[0])
    if attention not in ATTENTION:
        raise ConfigError(
            f"model.attention={short(attention)} is not known; use one of {list(ATTENTION)}"
        )
    given = definition.get("config")
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"model.config={short(given)} must be a table with model_type and its settings"
        )
    _check_values(given, "model.config", 0)
    kind = _config_class(given.get("model_type"))
    settings = {key: value for key, value in given.items() if key != "model_type"}
    known = known_settings(kind)
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"model.config.{key} is not a setting of model_type {given['model_type']!r}; "
                f"known: {sorted(known)}"
            )
    # Two configs are made: the first shows which defaults must be replaced.
    with _refusals(definition):
        defaults = kind(**settings)
        random = {k for k in known if _RANDOM.search(k) and _is_rate(getattr(defaults, k))}
        for key in settings.keys() & random:
            raise ConfigError(
                f"model.config.{key}={settings[key]!r} draws at random; an island draws nothing, "
                f"so that weights and rows fix the loss; leave it out or set it to 0"
            )
        fixed: dict[str, Any] = dict.fromkeys(random, 0.0)
        fixed |= {key: None for key in _TOKENS if key not in settings and _may_be_none(kind, key)}
        if "use_cache" in known:
            fixed["use_cache"] = False  # of generation
        return kind(**{**settings, **fixed}), str(attention)


def _built(definition: Mapping[str, object], *modes: AbstractContextManager[Any]) -> nn.Module:
    """The model as its constructor makes it under `modes`."""
    with _BUILDING, _refusals(definition), ExitStack() as entered:
        config, attention = _config(definition)
        for mode in modes:
            entered.enter_context(mode)
        model: nn.Module = _library("transformers").AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
    return model


def _config_class(model_type: object) -> Any:
    # The library's own tables: what a program registered beside them does not count.
    configs = _library("transformers.models.auto.configuration_auto")
    causal = _library("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = configs.CONFIG_MAPPING_NAMES.keys() & causal.keys()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"model.config.model_type={short(model_type)} is not a causal language model of "
            f"transformers {version()}; use one of its model types, such as 'llama' or 'gpt2'"
        )
    kind: Any = configs.CONFIG_MAPPING[model_type]
    if not kind.__module__.startswith("transformers.models."):
        raise ConfigError(
            f"model.config.model_type={model_type!r} was registered by {kind.__module__!r}; only "
            f"model types of transformers itself are built; {_CODE}"
        )
    if kind.sub_configs:
        raise ConfigError(
            f"model.config.model_type={model_type!r} is made of several models; use the type of "
            f"its text part"
        )
    return kind


def known_settings(kind: Any) -> frozenset[str]:
    """The settings of a model type: its config's own fields, not those of every config."""
    common = _library("transformers").PreTrainedConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    fields -= {field.name for field in dataclasses.fields(common)} | REFUSED.keys()
    return frozenset(n for n in fields if not n.startswith("_") and not n.endswith("_config"))


def _check_values(value: object, where: str, depth: int) -> None:
    if depth > MAX_NESTING:
        raise ConfigError(f"{where} is nested deeper than {MAX_NESTING} levels; a config is not")
    if not isinstance(value, Mapping | list):
        return _check_scalar(value, where)
    if len(value) > MAX_ENTRIES:
        raise ConfigError(f"{where} holds {len(value)} entries; at most {MAX_ENTRIES} are read")
    for entry in value:
        if isinstance(value, Mapping):
            _check_key(entry, where)
            _check_values(value[entry], f"{where}.{entry}", depth + 1)
        else:
            _check_values(entry, where, depth + 1)


def _check_key(key: object, where: str) -> None:
    if not isinstance(key, str) or not _WORD.fullmatch(key):
        raise ConfigError(f"{where} holds the key {short(key)}; a key is a plain word")
    if key in REFUSED:
        raise ConfigError(f"{where}.{key} is refused in a model definition; {REFUSED[key]}")
    if key.startswith("_"):
        raise ConfigError(f"{where}.{key} is private to transformers; leave it out")


def _check_scalar(value: object, where: str) -> None:
    if isinstance(value, str):
        if not _WORD.fullmatch(value):
            raise ConfigError(
                f"{where}={short(value)} must be a plain word; a config names no file, address "
                f"or code"
            )
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        limit = MAX_DEPTH_VALUE if _DEPTH.search(where) else MAX_WHOLE_NUMBER
        if abs(value) > limit:
            raise ConfigError(f"{where}={short(value)} is larger than {limit}; make it smaller")
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ConfigError(
            f"{where}={short(value)} is no setting; use numbers, words, booleans, lists and tables"
        )


def _same_version(definition: Mapping[str, object]) -> None:
    wanted = definition.get("version")
    if wanted is not None and wanted != version():
        raise ConfigError(
            f"model.version={short(wanted)} where this machine has transformers {version()!r}; "
            f"another version may compute another model from the same config; "
            f"pip install transformers=={wanted}"
        )


@contextmanager
def _refusals(definition: Mapping[str, object]) -> Iterator[None]:
    """Turns whatever transformers raises about a config into a ConfigError."""
    try:
        yield
    except AtollError:
        raise
    # The library checks values with errors of every kind, from ValueError to ZeroDivisionError.
    except Exception as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise ConfigError(
            f"transformers {version()} builds no model from {short(dict(definition))}: "
            f"{reason[:300]}; change model.config"
            + ("" if "attn_implementation" not in reason else ", or set model.attention='eager'")
        ) from exc


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            "model.architecture='transformers' needs the package transformers, which is not "
            "installed here; pip install 'atoll[transformers]'"
        ) from exc


def _may_be_none(kind: Any, key: str) -> bool:
    return any(f.name == key and "None" in str(f.type) for f in dataclasses.fields(kind))


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0
