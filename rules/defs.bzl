"""The rules of stagec. Load them from here; `aot_manifest` comes from a manifest's own repository."""

load("//rules:toolchain.bzl", _stagec_toolchain = "stagec_toolchain")
load("//rules/private:addition.bzl", _aot_bundle_addition = "aot_bundle_addition")
load("//rules/private:bundle.bzl", _aot_bundle = "aot_bundle")
load("//rules/private:executable.bzl", _aot_executable = "aot_executable")
load("//rules/private:export.bzl", _aot_export = "aot_export")
load("//rules/private:image.bzl", _aot_image = "aot_image", _aot_push = "aot_push")
load("//rules/private:jax_cache.bzl", _aot_jax_cache = "aot_jax_cache")
load("//rules/private:programs.bzl", _aot_programs = "aot_programs")
load("//rules/private:provenance.bzl", _aot_provenance = "aot_provenance")
load("//rules/private:pytest_test.bzl", _pytest_test = "pytest_test")
load("//rules/private:python_interpreter.bzl", _python_interpreter = "python_interpreter")
load("//rules/private:python_library.bzl", _python_library = "python_library")
load("//rules/private:python_program.bzl", _python_program = "python_program")
load("//rules/private:reproducibility_test.bzl", _aot_reproducibility_test = "aot_reproducibility_test")
load("//rules/private:signing.bzl", _aot_signing = "aot_signing")

aot_bundle = _aot_bundle
aot_bundle_addition = _aot_bundle_addition
aot_executable = _aot_executable
aot_export = _aot_export
aot_image = _aot_image
aot_jax_cache = _aot_jax_cache
aot_programs = _aot_programs
aot_provenance = _aot_provenance
aot_push = _aot_push
aot_reproducibility_test = _aot_reproducibility_test
aot_signing = _aot_signing
pytest_test = _pytest_test
python_interpreter = _python_interpreter
python_library = _python_library
python_program = _python_program
stagec_toolchain = _stagec_toolchain
