"""What a wrapper does to memory while a copy of it, or into it, is under way.

Enters: the source of a wrapper that Inductor generated. Leaves: sentences, none if the order is
safe: a copy back begins when what it is of has arrived, nobody reads what is not there yet, and
nothing that a copy reads or writes is freed or written over meanwhile. Shares no code
with autoremat.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

OPERATOR = re.compile(r"torch\.ops\.autoremat\.(\w+)\.default")


def races(source: str) -> list[str]:
    """Each place at which a wrapper touches what a copy still needs."""
    call = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    return list(_Walk().over(call.body))


class _Walk:
    def __init__(self) -> None:
        self.memory: dict[str, int] = {}  # by name
        self.leaving: dict[int, int] = {}  # the copy, and what it is of
        self.coming: dict[int, int] = {}
        self.count = 0

    def over(self, statements: list[ast.stmt]) -> Iterator[str]:
        for statement in statements:
            if isinstance(statement, ast.With | ast.If):
                yield from self.over(statement.body)
                continue
            text = ast.unparse(statement)
            if text.startswith("assert_"):
                continue
            if found := OPERATOR.search(text):
                yield from self.copy(found[1], statement, text)
            elif isinstance(statement, ast.Delete):
                yield from self.delete(statement, text)
            else:
                yield from self.use(statement, text)

    def new(self, name: str) -> int:
        self.count += 1
        self.memory[name] = self.count
        return self.count

    def of(self, name: str) -> int:
        return self.memory[name] if name in self.memory else self.new(name)

    def copy(self, operator: str, statement: ast.stmt, text: str) -> Iterator[str]:
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        given = [self.of(a.id) for a in statement.value.args if isinstance(a, ast.Name)]
        name = ast.unparse(statement.targets[0])
        if any(one in self.coming for one in given) and operator != "reloaded":
            yield f"{text}: reads what is not back yet"
        if operator == "offload":
            self.leaving[self.new(name)] = given[0]
        elif operator == "reload":
            if given[0] in self.leaving:
                yield f"{text}: has not arrived yet"
            self.coming[self.new(name)] = given[0]
        else:
            begun = self.leaving if operator == "offloaded" else self.coming
            if begun.pop(given[0], given[1]) != given[1]:
                yield f"{text}: waits for another copy"
            self.memory[name] = given[0]

    def delete(self, statement: ast.Delete, text: str) -> Iterator[str]:
        for target in statement.targets:
            gone = self.memory.pop(ast.unparse(target), None)
            if gone is not None and gone not in self.memory.values() and self.is_busy(gone):
                yield f"{text}: a copy is under way"

    def is_busy(self, one: int) -> bool:
        return any(one in (*copies, *copies.values()) for copies in (self.leaving, self.coming))

    def use(self, statement: ast.stmt, text: str) -> Iterator[str]:
        named = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
        read = {self.memory[name] for name in named if name in self.memory}
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if isinstance(statement.value, ast.Name) and statement.value.id in self.memory:
                if self.memory[statement.value.id] in (
                    *self.leaving.values(),
                    *self.coming.values(),
                ):
                    yield f"{text}: what a copy needs becomes another's"
                self.memory[name] = self.memory[statement.value.id]
                return  # another name
            self.new(name)
        if not read.isdisjoint(self.coming):
            yield f"{text}: reads what is not back yet"
        for out in re.findall(r"\bout=(?:\w+\()?(\w+)", text):
            if self.is_busy(self.of(out)):
                yield f"{text}: writes over what a copy needs"
        if not isinstance(statement, ast.Assign) and read & set(self.leaving):
            yield f"{text}: uses what has not arrived"
