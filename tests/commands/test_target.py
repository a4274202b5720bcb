"""`path/to/file.py:function`: what is accepted, and how the rest is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoremat.targets.target import Target, TargetError, load_target

HEAD = "import torch\nfrom torch import nn\n"
MAKE = HEAD + "def make():\n    return nn.Linear(3, 1), torch.ones(2, 3)\n"

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file, by default one that works, and returns it as a target."""

    def file(text: str = MAKE, function: str = "make", name: str = "model.py") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return f"{tmp_path / name}:{function}"

    return file


def returning(expression: str) -> str:
    return f"{HEAD}def make():\n    return {expression}\n"


def refused(target: str) -> str:
    """The message, which may not be a bare exception's."""
    with pytest.raises(TargetError) as caught:
        load_target(target)
    return str(caught.value)


def test_a_file_gives_model_and_inputs(write: Write) -> None:
    """One tensor is one positional input, and there is no loss function."""
    text = write()
    target = load_target(f" {text} ")
    assert isinstance(target.model, nn.Linear)
    assert [tuple(x.shape) for x in target.inputs] == [(2, 3)]
    assert target.keywords == {}
    assert target.loss_fn is None
    assert load_target(text).name == text


def test_a_module_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    """In a package of the working directory as well, as with `python -m`."""
    package = tmp_path / "target_package"
    package.mkdir()
    (package / "__init__.py").touch()
    write(name="target_package/models.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert isinstance(load_target("target_package.models:make").model, nn.Linear)
    assert sys.path == before


def test_a_tuple_is_positional_and_a_dict_is_keywords(write: Write) -> None:
    """As the model's call takes them."""
    two = load_target(write(returning("nn.Linear(3, 1), (torch.ones(2), torch.zeros(3))")))
    assert [x.numel() for x in two.inputs] == [2, 3]
    named = load_target(write(returning("nn.Linear(3, 1), {'input': torch.ones(2, 3)}")))
    assert named.inputs == ()
    assert list(named.keywords) == ["input"]


def test_files_beside_it_can_be_imported(tmp_path: Path, write: Write) -> None:
    """Absolutely, as a script does, relatively, and while the function runs."""
    (tmp_path / "target_width.py").write_text("WIDTH = 3\n", encoding="utf-8")
    (tmp_path / "target_late.py").write_text("ROWS = 2\n", encoding="utf-8")
    text = write(
        f"{HEAD}import target_width\nfrom .target_width import WIDTH\n"
        "def make():\n    import target_late\n"
        "    return nn.Linear(target_width.WIDTH, 1), torch.ones(target_late.ROWS, WIDTH)\n"
    )
    before = list(sys.path)
    assert load_target(text).inputs[0].shape == (2, 3)
    assert sys.path == before


def test_a_file_hides_no_module_that_has_its_name(write: Write) -> None:
    """A user's `random.py` is not the standard library's."""
    import random

    assert load_target(write(name="random.py")).inputs[0].shape == (2, 3)
    assert sys.modules["random"] is random


def test_the_loss_is_the_functions_or_the_models_own() -> None:
    """`loss_fn(output)`, else the output if it is one number, else its `.loss`."""
    model, two = nn.Linear(1, 1), torch.ones(2, requires_grad=True)
    by_function = Target(model, (), loss_fn=lambda output: output.sum())
    assert by_function.loss(two).item() == 2
    assert Target(model, ()).loss(two.sum()).item() == 2
    assert Target(model, ()).loss(SimpleNamespace(loss=two.mean())).item() == 1


def test_an_output_without_a_loss_is_refused() -> None:
    """It says what the output is and where a loss may come from."""
    target = Target(nn.Linear(1, 1), (), name="x.py:make")
    two = torch.ones(2, requires_grad=True)
    for output, found in (
        (two, "The model returned a tensor of shape (2,)"),
        ((two, two), "a tuple has as its loss None"),
        (SimpleNamespace(loss=None), "a SimpleNamespace has as its loss None"),
    ):
        with pytest.raises(TargetError) as caught:
            target.loss(output)
        assert f"x.py:make: {found}" in str(caught.value)
        assert "(model, inputs, loss_fn)" in str(caught.value)
    with pytest.raises(TargetError, match="loss_fn returned a float"):
        Target(nn.Linear(1, 1), (), loss_fn=lambda _: 1.0).loss(two)
    with pytest.raises(TargetError, match="needs no gradient"):
        target.loss(torch.tensor(1.0))


@pytest.mark.parametrize("text", ["model.py", ":make", "model.py:", "", ":"])
def test_no_colon(text: str) -> None:
    """Both parts are needed."""
    assert "path/to/file.py:function or package.module:function" in refused(text)


def test_the_file_is_missing(tmp_path: Path, write: Write) -> None:
    """Or a directory, or no Python."""
    assert f"does not exist in {Path.cwd()}" in refused(f"{tmp_path}/no.py:make")
    assert "is a directory" in refused(f"{tmp_path}:make")
    assert "is not a .py file" in refused(write(name="model.txt"))


def test_the_module_cannot_be_found() -> None:
    """The part that is missing is named."""
    assert "There is no module 'no_such_package'" in refused("no_such_package.models:make")
    assert "There is no module 'json.nothing'" in refused("json.nothing:make")
    assert "There is no module 'a-b'" in refused("a-b:make")
    assert "names no module" in refused("..models:make")


def test_a_module_that_fails_while_it_is_imported(write: Write) -> None:
    """Its own error, the line, and no half-imported module; also a script that exits."""
    before = set(sys.modules)
    message = refused(write(f"{HEAD}\nimport no_such_thing\n"))
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'" in message
    assert "model.py:4)" in message
    syntax = refused(write("def make(:\n"))
    assert "SyntaxError" in syntax
    assert "model.py:1)" in syntax
    assert "SystemExit: 2" in refused(write("import sys\nsys.exit(2)\n"))
    assert not [name for name in sys.modules.keys() - before if name.endswith(".model")]


def test_the_function_is_missing(write: Write) -> None:
    """Close names are offered, or what there is."""
    assert "no function 'mak'. Did you mean make?" in refused(write(function="mak"))
    assert "Did you mean make?" in refused(write(function="qqqq"))
    assert "It defines no function" in refused(write("x = 1\n"))


def test_it_is_no_function(write: Write) -> None:
    """A number cannot be called."""
    assert "'make' in" in (message := refused(write("make = 3\n")))
    assert "is an int, not a function" in message


def test_the_function_needs_arguments(write: Write) -> None:
    """They are named; defaults and stars are no obstacle."""
    assert "needs arguments (batch, width)" in refused(write("def make(batch, *, width): ...\n"))
    fine = MAKE.replace("make()", "make(batch=2, *rest, width=3, **more)")
    assert load_target(write(fine)).inputs


def test_the_function_raises(write: Write) -> None:
    """Its last line and the deepest line of the file, with the exception as the cause."""
    text = write(f"{HEAD}def make():\n    return nn.Linear('x', 1)\n")
    with pytest.raises(TargetError, match=r"model.py:make raised TypeError: .*model.py:4\)") as got:
        load_target(text)
    assert isinstance(got.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("None", "returned None"),
        ("nn.Linear(1, 1)", "returned a Linear"),
        ("(1, 2, 3, 4)", "returned a tuple of 4"),
        ("torch.ones(2), torch.ones(2)", "its model a tensor of shape (2,)"),
        ("nn.Linear(1, 1), [torch.ones(1)]", "as inputs a list of 1"),
        ("nn.Linear(1, 1), 'text'", "as inputs a str"),
        ("nn.Linear(1, 1), (torch.ones(1), 3)", "input 1 is an int, not a tensor"),
        ("nn.Linear(1, 1), {'x': None}", "input 'x' is None, not a tensor"),
    ],
)
def test_it_returns_something_else(write: Write, expression: str, found: str) -> None:
    """What it returned, and the forms that are accepted."""
    message = refused(write(returning(expression)))
    assert found in message
    assert "(model, inputs) or (model, inputs, loss_fn)" in message


def test_a_loss_function_is_callable(write: Write) -> None:
    """A tensor in its place is refused."""
    text = write(returning("nn.Linear(1, 1), torch.ones(1), torch.ones(1)"))
    assert "as its loss_fn a tensor of shape (1,)" in refused(text)


@pytest.mark.parametrize("keyword", ["'seed'", "'loss_fn'", "'model'", "3"])
def test_a_keyword_that_cannot_be_passed(write: Write, keyword: str) -> None:
    """Those of `autoremat.verify` are taken, and a keyword is text."""
    text = write(returning(f"nn.Linear(1, 1), {{{keyword}: torch.ones(1)}}"))
    assert f"input {keyword} cannot be passed" in refused(text)


def test_a_model_in_eval_mode(write: Write) -> None:
    """It says what to call."""
    assert "Call .train()" in refused(write(returning("nn.Linear(1, 1).eval(), torch.ones(1)")))


def test_inputs_on_another_device(write: Write) -> None:
    """Both devices are named; a model without tensors is nowhere."""
    message = refused(write(returning("nn.Linear(1, 1), torch.ones(1, device='meta')")))
    assert "input 0 is on meta, but the model is on cpu" in message
    assert load_target(write(returning("nn.Tanh(), torch.ones(1, device='meta')")))
