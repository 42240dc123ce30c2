"""What a bundle was built from: the statement and the SBOM.

Modules: `trust/sbom.py`, `cli/actions/provenance.py`.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stagec.trust.provenance import Wheel, directory_hash, installed
from tests.building import COMPILER, stagec
from tests.signed import write_bundle_of, write_provenance

URI = {"type": "string", "pattern": "^[a-z][a-z0-9+.-]*:[^ ]+$"}
HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
DIGEST = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"enum": ["sha256", "dirHash"]},
    "additionalProperties": HEX,
}


def fields(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


RESOURCE = fields({"name": {"type": "string"}, "digest": DIGEST}, {"uri": URI})
# https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md, https://slsa.dev/spec/v1.0/provenance#schema
STATEMENT = fields(
    {
        "_type": {"const": "https://in-toto.io/Statement/v1"},
        "subject": listed(fields({"name": {"type": "string"}, "digest": DIGEST})),
        "predicateType": {"const": "https://slsa.dev/provenance/v1"},
        "predicate": fields(
            {
                "buildDefinition": fields(
                    {"buildType": URI, "externalParameters": {"type": "object"}},
                    {"internalParameters": {"type": "object"}, "resolvedDependencies": listed(RESOURCE)},
                ),
                "runDetails": fields(
                    {
                        "builder": fields(
                            {"id": URI}, {"version": {"type": "object"}, "builderDependencies": listed(RESOURCE)}
                        )
                    }
                ),
            }
        ),
    }
)


@pytest.fixture(scope="module")
def bundle(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(zoo, tmp_path_factory.mktemp("provenance"), "loop")


@pytest.fixture(scope="module")
def written(bundle: Path) -> tuple[Path, Path]:
    return write_provenance(bundle)


def test_the_statement_is_as_its_specifications_say(written: tuple[Path, Path]) -> None:
    jsonschema.validate(json.loads(written[0].read_text()), STATEMENT)


def test_the_bill_of_materials_is_as_its_specification_says(written: tuple[Path, Path]) -> None:
    """The validator is CycloneDX's own, with its schema."""
    validators = pytest.importorskip("cyclonedx.validation.json")
    version = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_7
    assert validators.JsonStrictValidator(version).validate_str(written[1].read_text()) is None
    sbom = json.loads(written[1].read_text())
    assert sbom["metadata"]["component"]["type"] == "machine-learning-model"
    references = [sbom["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in sbom["components"])]
    assert len(set(references)) == len(references)
    assert [sbom["dependencies"][0]["ref"], *sbom["dependencies"][0]["dependsOn"]] == references


def test_subjects_are_the_bundle_and_every_member(bundle: Path, written: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(bundle) as archive:
        wanted = {f"zoo.aot/{name}": hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
    wanted["zoo.aot"] = hashlib.sha256(bundle.read_bytes()).hexdigest()
    subjects = json.loads(written[0].read_text())["subject"]
    assert {one["name"]: one["digest"]["sha256"] for one in subjects} == wanted
    assert len(subjects) == len(wanted)


def test_dependencies_are_manifest_sources_and_wheels(bundle: Path, written: tuple[Path, Path]) -> None:
    build = json.loads(written[0].read_text())["predicate"]["buildDefinition"]
    assert [(one["name"], one.get("uri")) for one in build["resolvedDependencies"]] == [
        ("tests/zoo.toml", None),
        ("tests/model.py", None),
        ("jax-0.10.1-py3-none-any.whl", "pkg:pypi/jax@0.10.1"),
        ("ml_dtypes-0.5.1+local-cp311-cp311-manylinux_2_17_x86_64.whl", "pkg:pypi/ml-dtypes@0.5.1%2Blocal"),
    ]
    digests = [one["digest"] for one in build["resolvedDependencies"]]
    files = [(bundle.parent / name).read_bytes() for name in ("zoo.toml", "model.py")] + [b"jax", b"ml_dtypes"]
    assert digests == [{"sha256": hashlib.sha256(content).hexdigest()} for content in files]
    assert build["externalParameters"]["manifest"] == build["resolvedDependencies"][0]
    assert build["internalParameters"] == {
        "python": ["3.11.2"],
        "slices": {"zoo.loop": hashlib.sha256(b"{}").hexdigest()},
    }


def test_variables_that_the_manifest_declares_are_told(bundle: Path, tmp_path: Path) -> None:
    text = json.dumps({"environment": {"EQX_ON_ERROR": "nan"}})
    (tmp_path / "other.json").write_text(text)
    copy = Path(shutil.copy(bundle, tmp_path / "zoo.aot"))
    statement, _ = write_provenance(copy, "--spec", f"zoo.other:{tmp_path}/other.json")
    build = json.loads(statement.read_text())["predicate"]["buildDefinition"]
    assert build["internalParameters"]["environment"] == {"zoo.other": {"EQX_ON_ERROR": "nan"}}


def builders(statement: Path) -> list[dict[str, Any]]:
    dependencies = json.loads(statement.read_text())["predicate"]["runDetails"]["builder"]["builderDependencies"]
    return list(dependencies)


def dir_hash(folder: Path, files: Iterable[Path]) -> str:
    contents = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    lines = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def test_an_extension_that_traced_a_function_is_told(bundle: Path, written: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copy(bundle, tmp_path / "zoo.aot"))
    for name, frontend in (("other", "arrays"), ("third", "jax")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"frontend": frontend}))
    specs = [f"zoo.{name}:{tmp_path}/{name}.json" for name in ("other", "third")]
    statement, _ = write_provenance(copy, "--spec", specs[0], "--spec", specs[1])
    core, arrays = builders(statement)
    assert [core] == builders(written[0])
    folder = COMPILER / "extensions" / "arrays" / "stagec_arrays"
    assert arrays == {"name": "stagec_arrays", "digest": {"dirHash": dir_hash(folder, folder.rglob("*.py"))}}


def test_the_digest_of_the_compiler_has_its_tables(written: tuple[Path, Path]) -> None:
    (core,) = builders(written[0])
    folder = COMPILER / "stagec"
    files = [*folder.rglob("*.py"), folder / "releases.toml", *folder.glob("patches/*.json")]
    assert core["digest"] == {"dirHash": dir_hash(folder, files)}


def test_the_same_inputs_elsewhere_are_the_same_bytes(bundle: Path, written: tuple[Path, Path], tmp_path: Path) -> None:
    again = write_provenance(Path(shutil.copy(bundle, tmp_path / "zoo.aot")))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    assert not any(str(folder).encode() in path.read_bytes() for folder in (tmp_path, bundle.parent) for path in again)


def test_a_folder_among_the_sources_has_in_totos_digest(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("c")
    (tmp_path / "a.txt").write_text("a")
    lines = [f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in (("a.txt", b"a"), ("b/c.txt", b"c"))]
    assert directory_hash(tmp_path) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_a_list_of_packages_that_is_none(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "packages.json").write_text('{"packages": []}')
    done = stagec(
        *("action", "provenance", "--bundle", bundle, "--output", "a", "--sbom", "b"),
        *("--manifest", f"m:{bundle}", "--packages", "packages.json"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (2, "packages.json: not a list of packages: the key 'python' is missing\n")
    assert [path.name for path in tmp_path.iterdir()] == ["packages.json"]


def test_installed_packages_whose_wheels_nobody_knows(tmp_path: Path) -> None:
    """By pip, by Debian, by an old setuptools; and what is not a package."""
    files = {
        "a_b-1.dist-info/METADATA": "Name: A.b\nVersion: 1\n",
        "a_b-1.dist-info/RECORD": "a.py,sha256=x,1\r\n",
        "c-2.egg-info/PKG-INFO": "Name: c\nVersion: 2\n",
        "d-3.egg-info": "Name: d\nVersion: 3\n",
        "e-4.dist-info/INSTALLER": "pip\n",
        "stagec_arrays-1.dist-info/METADATA": "Name: stagec_arrays\nVersion: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    names = ("A.b", "1", "a_b-1.dist-info/RECORD"), ("c", "2", "c-2.egg-info/PKG-INFO"), ("d", "3", "d-3.egg-info")
    digests = (hashlib.sha256(files[name].encode()).hexdigest() for _, _, name in names)
    packages = installed([str(tmp_path / "none"), str(tmp_path)])
    assert packages == [Wheel(*name, digest) for name, digest in zip(names, digests, strict=True)]
    assert not any(package.is_file for package in packages)


def test_the_url_of_a_package_of_debian() -> None:
    package = Wheel("libstdc++6", "12.2.0-14+deb12u1", "libstdc++6_12.2.0-14+deb12u1_arm64.deb", "0" * 64)
    assert package.purl == "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=arm64"
