"""A page about a bundle, for people: one HTML file."""

load("//rules:providers.bzl", "AotBundleInfo", "AotProvenanceInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")

def _aot_report_impl(ctx):
    info = ctx.attr.bundle[AotBundleInfo]
    statement = ctx.attr.provenance[AotProvenanceInfo].statement
    executables = info.executables.to_list()
    inventories = [one.inventory for one in executables]
    profiles = [one.profile for one in info.exports.to_list() + executables]
    page = ctx.actions.declare_file(ctx.label.name + ".html")
    timed = ctx.actions.declare_file(ctx.label.name + ".timed.html")

    # Seconds differ every time, so the page that has them is another one.
    for output, times in [(page, []), (timed, profiles)]:
        arguments = ctx.actions.args()
        arguments.add(info.bundle)
        arguments.add("--output", output)
        arguments.add("--statement", statement)
        arguments.add_all(inventories, before_each = "--inventory")
        arguments.add_all(times, before_each = "--times")
        compiler_action(
            ctx,
            mnemonic = "StagecReport",
            progress_message = "Reporting on %s" % info.name,
            command = "report",
            arguments = arguments,
            inputs = depset([info.bundle, statement] + inventories + times),
            outputs = [output],
            extension = extension_of(ctx.attr._extension),
        )
    return [DefaultInfo(files = depset([page])), OutputGroupInfo(timed = depset([timed]))]

aot_report = rule(
    implementation = _aot_report_impl,
    doc = "Writes `<manifest>.report.html`, a page that needs no network: for each function and target memory by array, " +
          "operations, exchanges, roofline, limits; and the provenance. The output group `timed` is " +
          "`<manifest>.report.timed.html`, which has the seconds of the build too. `aot_manifest` declares it.",
    attrs = {
        "bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo]),
        "provenance": attr.label(doc = "The bundle's provenance.", mandatory = True, providers = [AotProvenanceInfo]),
        "_extension": extension_attr("insight"),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
