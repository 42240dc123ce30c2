"""Lets a Bazel that a distribution packaged work without a network."""

_CC = ["cc_binary", "cc_import", "cc_library", "cc_proto_library", "cc_test", "cc_toolchain", "cc_toolchain_suite", "objc_library"]

_JAVA = ["java_binary", "java_import", "java_library", "java_proto_library", "java_runtime", "java_test", "java_toolchain"]

# What Bazel 4 loads from the network for any custom toolchain (the C++ and Java rules, which are part of that Bazel
# anyway) and for any test (the coverage reporter, which is not run): the package, its rules and its targets.
_STUBS = {
    "remote_coverage_tools": struct(package = "", rules = [], targets = ["coverage_report_generator", "lcov_merger"]),
    "rules_cc": struct(package = "cc", rules = _CC, targets = []),
    "rules_java": struct(package = "java", rules = _JAVA, targets = []),
}

def _stub_repository_impl(repository_ctx):
    repository_ctx.file("WORKSPACE", "", executable = False)
    folder = repository_ctx.attr.package + "/" if repository_ctx.attr.package else ""
    targets = [
        'filegroup(name = "%s", visibility = ["//visibility:public"])\n' % target
        for target in repository_ctx.attr.targets
    ]
    repository_ctx.file(folder + "BUILD", "".join(targets), executable = False)
    rules = ["%s = native.%s\n" % (rule, rule) for rule in repository_ctx.attr.rules]
    repository_ctx.file(folder + "defs.bzl", "".join(rules), executable = False)

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    doc = "A repository with one package, instead of one that would be fetched.",
    attrs = {
        "package": attr.string(doc = "The package."),
        "rules": attr.string_list(doc = "Rules that are built into Bazel, for its defs.bzl."),
        "targets": attr.string_list(doc = "Targets without files, for its BUILD."),
    },
)

def stagec_offline_repositories():
    """Lets Bazel 4 build and test without a network. Does nothing on a later Bazel.

    Call it first in a WORKSPACE file. Repositories that are declared before it stay as they are.
    """
    if hasattr(native, "package_relative_label"):
        return
    for name, stub in _STUBS.items():
        if name not in native.existing_rules():
            _stub_repository(name = name, package = stub.package, rules = stub.rules, targets = stub.targets)
