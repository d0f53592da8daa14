"""Hooks of MkDocs (mkdocs.yml): a page with the YAML files of conf/, and links to files outside of docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK_TO_PARENT = re.compile(r"\]\((\.\./[^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the config keys, so that the search finds each key with its comment."""
    sources = [
        ROOT / "conf/config.yaml",
        ROOT / "speechtrain/trainer_config.py",
        *sorted(ROOT.glob("conf/*/*.yaml")),
    ]
    parts = ["# Config keys"]
    for path in sources:
        language = "yaml" if path.suffix == ".yaml" else "python"
        text = path.read_text(encoding="utf-8")
        parts.append(f"## {path.relative_to(ROOT)}\n\n```{language}\n{text}```")
    files.append(File.generated(config, "config-keys.md", content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a link that leaves docs/ name the file on the code host."""
    folder = Path(page.file.src_uri).parent

    def on_code_host(link: re.Match[str]) -> str:
        target = os.path.normpath(Path("docs") / folder / link[1])
        if target.startswith("docs"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{target})"

    return LINK_TO_PARENT.sub(on_code_host, markdown)
