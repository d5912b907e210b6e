"""The examples in the documents work, and the names and links in the documents exist.

``tox run -e docs`` builds the site. It also checks the links, as far as they lead to pages.
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core
import typer.main

from sglrl.launching.tiny_model import tiny_model
from sglrl.tools.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
INCLUDED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
INCLUDED.append(ROOT / "bench/README.md")
"""Documents outside of ``docs`` that are pages of the site too (``docs/site/hooks.py``)."""
REFERENCE = ROOT / "docs/reference"
PUBLIC_MODULES = [
    "sglrl",
    "sglrl.errors",
    "sglrl.integrations.genlm",
    "sglrl.integrations.gymnasium",
    "sglrl.integrations.torchrl",
    "sglrl.integrations.trl",
    "sglrl.integrations.verifiers",
    "sglrl.rl",
    "sglrl.rollouts",
    "sglrl.weights",
]
DEFINED_ELSEWHERE = {"sglrl.integrations.genlm.Token": "sglrl.integrations.genlm.vocabulary.Token"}
"""Public names that the reference takes from another module. genlm-backend may define ``Token``."""
FOREIGN = {"sglrl.integrations.torchrl.RLSGLangEngine"}
"""Public names of another package, which documents them."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def prose_of(document: Path) -> str:
    """Return the text of a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and MkDocs derive them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in headings}


def test_the_readmes_example_runs_as_a_plain_script(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = '"Qwen/Qwen3-0.6B", replicas=1'
    assert code.count(model) == 1
    script = tmp_path / "example.py"
    script.write_text(code.replace(model, f'{str(tiny_model())!r}, engine="fake", vocab_size=512'))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines()]
    assert len(lines) == 256
    # Each line has 64 tokens, the sum of the fake engine's logprobs, and the judge's reward.
    assert {length for length, _, _ in lines} == {"64"}
    assert {float(total) for _, total, _ in lines} == {-64 * 65 / 2 / 1024}
    assert {reward for _, _, reward in lines} <= {"0.0", "1.0"}


def test_the_quick_start_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    assert len(page.split()) < 300
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(codes) == 2
    script = tmp_path / "example.py"
    script.write_text("".join(codes).replace('device="cpu"', 'engine="fake", vocab_size=512'))
    runpy.run_path(str(script), run_name="example")
    first, second, *groups = capsys.readouterr().out.splitlines()
    # The fake engine repeats the prompt.
    assert first.startswith("2 + 2 =")
    assert second == str(["length"] * 4)
    assert {int(line.split()[0]) for line in groups} == {*range(16)}
    assert all("<Trajectory '" in line for line in groups)


def test_the_actors_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/actors.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "1.0 0.0\n2\n4\n(9,)\n2\n"


def test_the_gateway_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, whose fork server imports SGLang once for all these tests."""
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/gateway.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    runpy.run_path(str(script))
    assert re.search(r"<Trajectory .* 2 turns, reward=[01]>", capsys.readouterr().out)


def test_the_environment_of_gymnasium_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/environments.md").read_text()
    *_, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code.count('device="cpu"') == 1
    exec(code.replace('device="cpu"', 'engine="fake", vocab_size=512'), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert re.fullmatch(r"\[(0\. ?)*([01]\.)\] (True|False)", line), line


def texts_of(folder: str) -> list[str]:
    """Return the texts in the Python code of a folder, with {} for each value in an f-string."""
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                found.append("".join(map(str, parts)))
    return found


def test_messages_in_troubleshooting_exist() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 20
    texts = texts_of("sglrl") + texts_of("workers")
    assert [message for message in messages if not any(message in text for text in texts)] == []


@pytest.mark.parametrize("document", [*INCLUDED, *PAGES], ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", prose_of(document)):
        file = (document.parent / target).resolve() if target else document
        assert file.exists(), target
        if anchor and not anchor.startswith("sglrl."):
            assert anchor in anchors_of(file), f"{target}#{anchor}"


def test_files_that_the_documents_name_exist() -> None:
    named = {
        (name_of(document), name)
        for document in [*INCLUDED, *PAGES]
        for name in re.findall(r"\b((?:sglrl|workers|tests)/[\w/]+\.py)\b", document.read_text())
    }
    assert len(named) > 50
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_functions_that_the_documents_name_are_in_their_file() -> None:
    """A step such as "`sglrl/core/fabric.py`, `Fabric.submit`" names the function's own file."""
    pattern = r"`((?:sglrl|workers)/[\w/]+\.py)`, `(\w+)(?:\.(\w+))?`"
    missing = []
    found = [name for page in PAGES for name in re.findall(pattern, page.read_text())]
    assert len(found) > 20
    for file, name, method in found:
        tree = ast.parse((ROOT / file).read_text())
        names = {getattr(node, "name", "") for node in tree.body}
        if method:
            names &= {name}
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    names |= {getattr(member, "name", "") for member in node.body}
        if not {name, method or name} <= names:
            missing.append((file, name, method))
    assert missing == []


def navigation() -> dict[str, str]:
    """Return the pages of the site in order: their files and titles."""
    found = re.search(r"^nav:\n(.*?)\n\n", (ROOT / "mkdocs.yml").read_text(), re.M | re.S)
    assert found is not None
    pages = re.findall(r"- (.*): (\S+\.md)$", found[1], re.MULTILINE)
    return {file: title for title, file in pages}


def test_every_page_is_in_the_navigation() -> None:
    included = ["index.md", "contributing.md", "changelog.md", "benchmarks.md"]
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    assert sorted(navigation()) == sorted(included + pages)


def test_llms_txt_lists_every_page_of_the_site() -> None:
    """See https://llmstxt.org. A link is relative to the root of the site."""
    title, summary, *blocks = (ROOT / "docs/llms.txt").read_text().split("\n\n")
    assert (title, summary[:2]) == ("# sglrl", "> ")
    links = [line for block in blocks for line in block.splitlines() if line.startswith("- ")]
    found = [re.fullmatch(r"- \[(.+)\]\((\S+)\): \S.*[^.]", line) for line in links]
    urls = {file: re.sub(r"(?:index)?\.md$", "/", file) for file in navigation()}
    assert [link and link.groups() for link in found] == [
        (title, "./" if url == "/" else url)
        for title, url in zip(navigation().values(), urls.values(), strict=True)
    ]


def test_llms_txt_counts_the_examples() -> None:
    (count,) = re.findall(r"\): (\d+) complete programs", (ROOT / "docs/llms.txt").read_text())
    assert int(count) == len([*(ROOT / "examples").glob("*.py")])


def test_llms_txt_names_the_supported_versions() -> None:
    """It has them from ``docs/supported.md``, which is checked."""
    text = (ROOT / "docs/llms.txt").read_text()
    (versions,) = re.findall(r"SGLang (\S+ to [\d.]+)\. ", text)
    assert f"| SGLang | {versions} " in (ROOT / "docs/supported.md").read_text()


def public_names(module: str) -> list[str]:
    """Return the ``__all__`` of a module, which is not imported: some modules import torch."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def test_the_reference_has_an_entry_for_each_public_name() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    entries.remove("sglrl.errors")  # The tree of errors.
    assert len(entries) == len(set(entries))
    top = set(public_names("sglrl"))
    expected = {f"sglrl.{name}" for name in top}
    for module in PUBLIC_MODULES[1:]:
        names = {f"{module}.{name}" for name in public_names(module) if name not in top}
        expected |= {DEFINED_ELSEWHERE.get(name, name) for name in names}
    assert set(entries) == expected - FOREIGN


def default_of(option: typer.core.TyperOption) -> str:
    """Return the default value of an option as the reference shows it."""
    if isinstance(option.show_default, str):
        return option.show_default.removesuffix(", made here")
    if option.default is None:
        return "none"
    if isinstance(option.default, bool):
        return option.name or "" if option.default else "off"
    return str(option.default)


def test_the_reference_has_every_option_of_the_command_line() -> None:
    _, *sections = re.split(r"^## ", (REFERENCE / "cli.md").read_text(), flags=re.MULTILINE)
    group = typer.main.get_group(app)
    documents = {section.split("\n")[0]: section for section in sections}
    assert documents.keys() == group.commands.keys()
    for name, command in group.commands.items():
        documented = dict(re.findall(r"^\| (`-.*?) \| (.*?) \|", documents[name], re.MULTILINE))
        options = [p for p in command.params if isinstance(p, typer.core.TyperOption)]
        assert documented == {
            ", ".join(f"`{text}`" for text in [*option.opts, *option.secondary_opts]): default_of(
                option
            )
            for option in options
        }, name


def test_help_texts_are_phrases_that_stand_alone() -> None:
    """They name what the option is or does: "Maximum number of tokens", not "Per sample."."""
    group = typer.main.get_group(app)
    for command in group.commands.values():
        for option in command.params:
            text = getattr(option, "help", None) or ""
            assert text[-1:] == ".", (command.name, option.name)
            assert not re.match(r"(Of|Per|For|That|Its|As|With)\b(?!.*:)", text), text


def test_llms_txt_names_every_command() -> None:
    (line,) = re.findall(r"^- \[Command line\].*", (ROOT / "docs/llms.txt").read_text(), re.M)
    for name in typer.main.get_group(app).commands:
        assert name in line


@pytest.mark.parametrize("document", [*INCLUDED, *PAGES], ids=name_of)
def test_lists_are_written_so_that_the_site_shows_them(document: Path) -> None:
    """MkDocs nests a list by four spaces and needs an empty line before it. GitHub does not."""
    before = ""
    for line in prose_of(document).splitlines():
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if item is not None:
            assert len(item[1]) % 4 == 0, line
            assert not before or before.startswith(" ") or re.match(r"[-*]|\d+\.", before), line
        before = line
