"""A model and one batch from a Hugging Face configuration: `hf:CONFIG.json`.

Enters: the path of a `config.json` and the batch's sizes. Leaves: a `Target` with random weights,
or without any on the meta device. Guarantees: nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat.errors import reason_of
from autoremat.targets.arguments import HF, TargetArguments
from autoremat.targets.target import Target, TargetError, last_line, load_target

# The first that fits is taken: a decoder alone comes after the whole model that it is part of.
_AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModelForSequenceClassification",
)
# What labels look like, by how the class's name ends.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_CLASS_HEADS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForImageClassificationWithTeacher",
)
_POSITIONS = ("max_position_embeddings", "max_target_positions")
_IMAGE_SIZE = 224  # where any size will do, as for convolutions
_IN_A_FILE = "Write a function that returns (model, inputs), and give file.py:function."


def load(target: TargetArguments, *, without_weights: bool = False) -> Target:
    """The model and batch of any target.

    Args:
        target: what the user wrote.
        without_weights: whether those of a configuration go to the meta device.

    Raises:
        TargetError: naming what is wrong.
    """
    if target.is_hf:
        return load_hf(target, without_weights=without_weights)
    return load_target(target.text)


def load_hf(arguments: TargetArguments, *, without_weights: bool) -> Target:
    """Build the model and a batch of the sizes asked for.

    Args:
        arguments: their text begins with `hf:`.
        without_weights: whether both go to the meta device.

    Raises:
        TargetError: naming what is wrong with the file or the sizes.
    """
    path = Path(arguments.text.removeprefix(HF))
    config = _configuration(path)
    place: AbstractContextManager[Any] = torch.device("meta") if without_weights else nullcontext()
    try:
        with place, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights in each process
            model = _model_class(path, config)(config)
            _set_loss(model)
            model = model.to(_dtype(arguments, config)).train()
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{path}: the model cannot be built: {last_line(error)}.") from error
    with place:
        keywords = batch_of(model, arguments)
    return Target(model, (), keywords, None, arguments.text)


def most_positions(model: nn.Module) -> int | None:
    """How many tokens a sequence of a model may have; None if its configuration says nothing."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [getattr(text, name, None) for name in _POSITIONS]
    return min((most for most in found if isinstance(most, int) and most > 0), default=None)


def _set_loss(model: nn.Module) -> None:
    """Say what transformers assumes of a language model's loss, before it warns of it.

    The names of some classes, GPT2LMHeadModel among them, tell transformers nothing about the
    loss. It then warns within the forward, which would split the step into two graphs.
    """
    if type(model).__name__.endswith("LMHeadModel") and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]


def _configuration(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise TargetError(
            "hf: targets need the package transformers: pip install transformers."
        ) from error
    if not path.name:
        raise TargetError(f"{HF} names no file. Write {HF}path/to/config.json.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {reason_of(error)}.") from error
    except ValueError as error:
        raise TargetError(f"{path} cannot be read as JSON: {last_line(error)}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise TargetError(
            f"{path} is no configuration of transformers: it has no 'model_type'. Give the "
            "config.json of a model."
        )
    kind = data.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **data)
    except Exception as error:
        raise TargetError(
            f"{path}: transformers {transformers.__version__} makes no configuration of "
            f"model_type {kind!r}: {last_line(error)}."
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of earlier tokens are no part of training
    return config


def _model_class(path: Path, config: Any) -> type[nn.Module]:
    """The class that the configuration names, else the first head that fits it."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(name), None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise TargetError(f"{path}: transformers has no architecture {name!r}.")
        return found
    for name in _AUTO_CLASSES:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise TargetError(
        f"{path}: no head with a loss is known for {type(config).__name__}. Name one under "
        f"'architectures'. Or: {_IN_A_FILE}"
    )


def _dtype(arguments: TargetArguments, config: Any) -> torch.dtype:
    given = arguments.dtype or getattr(config, "dtype", None) or torch.float32
    found = given if isinstance(given, torch.dtype) else getattr(torch, str(given), None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise TargetError(
            f"--dtype {given!r} is no floating-point type of torch: give float32, bfloat16 or "
            "float16."
        )
    return found


def batch_of(model: nn.Module, arguments: TargetArguments) -> dict[str, torch.Tensor]:
    """Random inputs and labels of the sizes asked for.

    Args:
        model: as `load_hf` makes it.
        arguments: its configuration, and the sizes.

    Raises:
        TargetError: if the model does not take them.
    """
    path = Path(arguments.text.removeprefix(HF))
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main = str(getattr(model, "main_input_name", "input_ids"))
    dtype = next(model.parameters()).dtype
    if main == "input_ids":
        inputs = {main: _tokens(arguments, text)}
    else:
        shape = (arguments.batch, *_sample_shape(path, main, config, arguments.seq))
        inputs = {main: torch.randn(shape, dtype=dtype)}
    name = type(model).__name__
    if "labels" not in inspect.signature(model.forward).parameters:
        raise TargetError(f"{path}: {name} computes no loss: it takes no labels. {_IN_A_FILE}")
    if name.endswith(_TOKEN_HEADS):
        inputs["labels"] = inputs[main] if main == "input_ids" else _tokens(arguments, text)
    elif name.endswith(_CLASS_HEADS):
        inputs["labels"] = torch.zeros(arguments.batch, dtype=torch.long)
    else:
        raise TargetError(f"{path}: the labels that {name} takes are not known. {_IN_A_FILE}")
    return inputs


def _tokens(arguments: TargetArguments, config: Any) -> torch.Tensor:
    _require_positions(arguments, config)
    return torch.randint(0, config.vocab_size, (arguments.batch, arguments.seq))


def _require_positions(arguments: TargetArguments, config: Any) -> None:
    for name in _POSITIONS:
        most = getattr(config, name, None)
        if isinstance(most, int) and 0 < most < arguments.seq:
            raise TargetError(
                f"--seq {arguments.seq} is more than the {most} positions of the configuration "
                f"({name})."
            )


def _sample_shape(path: Path, main: str, config: Any, seq: int) -> tuple[int, ...]:
    """Sizes of one image or one piece of sound."""
    vision = getattr(config, "vision_config", config)
    if main == "pixel_values" and (
        hasattr(vision, "image_size") or hasattr(vision, "num_channels")
    ):
        size = getattr(vision, "image_size", _IMAGE_SIZE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return int(getattr(vision, "num_channels", 3)), int(height), int(width)
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        return int(config.num_mel_bins), 2 * int(config.max_source_positions)
    if main == "input_values" and hasattr(config, "conv_stride"):
        return (seq * math.prod(config.conv_stride),)
    raise TargetError(f"{path}: a batch of {main} cannot be made up. {_IN_A_FILE}")
