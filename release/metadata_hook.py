"""Puts the addresses of addresses.toml into the metadata of the package, as its links; hatchling runs it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AddressesHook(MetadataHookInterface):
    """`project.urls`. An installed package needs no file of the repository to know them."""

    def update(self, metadata: dict[str, Any]) -> None:
        with (Path(self.root) / "release" / "addresses.toml").open("rb") as file:
            addresses = tomllib.load(file)
        name = addresses["index_name"]
        if name not in ("", metadata["name"]):
            raise ValueError(f"release/addresses.toml: index_name is {name!r}, but the package is {metadata['name']!r}")
        links = {
            "Index": f"https://pypi.org/project/{name}/" if name else "",
            "Repository": addresses["repository"],
            "Documentation": addresses["documentation"],
        }
        metadata["urls"] = {label: link for label, link in links.items() if link}
