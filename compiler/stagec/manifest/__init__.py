"""The manifest: read it, plan it, describe its format. Needs pydantic, and nothing else beyond the standard library."""

from stagec.manifest.load import Manifest, load_manifest
from stagec.manifest.planning import Plan, describe, plan
from stagec.manifest.schema import schema
from stagec.manifest.targets import target_files

__all__ = ["Manifest", "Plan", "describe", "load_manifest", "plan", "schema", "target_files"]
