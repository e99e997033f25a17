"""The EAGLE-3 setters in SGLang's source, each run by itself: no model is loaded and nothing of SGLang imported."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTER = "set_eagle3_layers_to_capture"
LAYERS = 61
DELEGATES = "that of its language model"


class Inner:
    """What a setter sets layers on, with a setter of its own where the real one has one."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace() for _ in range(LAYERS)]
        self.layers_to_capture: list[int] = []
        self.delegated = False

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.layers_to_capture = list(layers)


class LanguageModel(Inner):
    """A language model inside a multimodal wrapper: setting ids on it is its own setter's business."""

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.delegated = True


class Source:
    """The model files of an SGLang: classes by (file, name), with their bases and methods."""

    def __init__(self, models: Path) -> None:
        self.classes: dict[tuple[str, str], ast.ClassDef] = {}
        self.named: dict[str, list[ast.ClassDef]] = {}
        for path in sorted(models.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    self.classes[path.name, node.name] = node
                    self.named.setdefault(node.name, []).append(node)

    def setters(self) -> dict[tuple[str, str], ast.FunctionDef]:
        """Each class's own setter that takes ids (that of an inner model takes boundaries and is left out)."""
        return {
            key: function
            for key, node in self.classes.items()
            if (function := method(node, SETTER)) and "layer_ids" in {argument.arg for argument in function.args.args}
        }

    def finds_inner(self, name: str) -> bool:
        """Whether something that a model of that class is made of collects states, be it further inside."""
        todo, seen = [name], set[str]()
        while todo:
            one = todo.pop()
            if one in seen or one not in self.named:
                continue
            seen.add(one)
            for node in self.named[one]:
                if one != name and {"layers", "layers_to_capture"} <= assigned(node):
                    return True
                todo += [*built_by(node), *(ast.unparse(base).rpartition(".")[2] for base in node.bases)]
        return False


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name), None)


def assigned(node: ast.ClassDef) -> set[str]:
    """Attributes of self that `__init__` sets."""
    init = method(node, "__init__")
    targets = (
        [target for one in ast.walk(init) if isinstance(one, ast.Assign) for target in one.targets] if init else []
    )
    targets += [one.target for one in ast.walk(init) if isinstance(one, ast.AnnAssign)] if init else []
    parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute)]
    return {part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == "self"}


def built_by(node: ast.ClassDef) -> set[str]:
    """Names that a class mentions where it makes its parts: the classes of these are among them."""
    scope: list[ast.AST] = [one for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign))]
    scope += [one for name in ("__init__", "_init_model", "_build_model") if (one := method(node, name))]
    return {part.id for one in scope for part in ast.walk(one) if isinstance(part, ast.Name)}


def boundaries(function: ast.FunctionDef, ids: list[int]) -> list[int] | str:
    """What a setter makes of `ids` for a model of 61 layers: boundaries, or that it asks its language model."""
    config = SimpleNamespace(num_hidden_layers=LAYERS)
    config.text_config = config
    last = SimpleNamespace(is_last_rank=True)
    language = LanguageModel()
    model = SimpleNamespace(config=config, pp_group=last, model=Inner(), language_model=language)
    bare = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(bare, ast.FunctionDef)
    bare.returns, bare.decorator_list = None, []
    for argument in bare.args.args:
        argument.annotation = None
    known: dict[str, Any] = {"get_parallel": lambda: SimpleNamespace(pp_group=last), "get_pp_group": lambda: last}
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), SETTER, "exec"), known)
    known[SETTER](model, list(ids))
    if language.delegated:
        return DELEGATES
    return sorted(model.model.layers_to_capture or language.layers_to_capture)


def rule(function: ast.FunctionDef) -> str:
    """How a setter reads ids, in words."""
    found = [boundaries(function, ids) for ids in ([2, 30, 58], [1, 29, 57], [24, 30, LAYERS])]
    rules = {
        "outputs": [[3, 31, 59], [2, 30, 58], [25, 31, 62]],
        "boundaries, outputs if the first is 1": [[2, 30, 58], [2, 30, 58], [24, 30, 61]],
        "outputs, boundaries if the last is the number of layers": [[3, 31, 59], [2, 30, 58], [24, 30, 61]],
        DELEGATES: [DELEGATES] * 3,
    }
    return next((name for name, made in rules.items() if made == found), f"unknown: {found}")
