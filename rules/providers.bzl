"""The providers that stagec's rules pass to each other and to yours."""

PythonEnvironmentInfo = provider(
    doc = "An installed, locked set of Python packages and the interpreter that runs them.",
    fields = {
        "interpreter": "string: absolute path of the interpreter that installed them, which programs run.",
        "version": "string: its full version, such as 3.11.2.",
        "execution_interpreter": "string: absolute path of the interpreter that actions run.",
        "execution_version": "string: its full version.",
        "execution_packages": "string: absolute path of a folder with the fingerprint and the packages, where actions run; " +
                              "empty: they are inputs.",
        "emulated": "InterpreterInfo: a program instead of both, which runs an interpreter of another architecture; " +
                    "None: the machine itself runs them.",
        "abi": "string: the ABI of both, such as cpython-311-x86_64-linux-gnu.",
        "site_packages": "File: the source directory that holds the packages. Bazel does not look at what is in it.",
        "fingerprint": "File: a digest of the packages' files and the ABI. It is an input of every action that uses them, " +
                       "so that the action runs again when they change.",
        "examined": "list of File: the rows of libraries in it that stagec does not know (examination.bzl). They are inputs of " +
                    "actions whose manifest says `examined = \"here\"`, with their folders on the import path.",
        "packages": "File: the interpreter's version, and name, version, file name and SHA-256 of every package's wheel, " +
                    "as JSON.",
    },
)

InterpreterInfo = provider(
    doc = "The interpreter of a Python toolchain.",
    fields = {
        "executable": "File, or string: an absolute path.",
        "files": "depset of File: what it needs; empty if it is installed.",
        "version": "string: its full version, such as 3.11.2; empty: that of the environment's.",
        "packages": "File: what it was unpacked from, as in PythonEnvironmentInfo; None: not known.",
    },
)

PythonSourcesInfo = provider(
    doc = "Python sources and the folders that they are imported from.",
    fields = {
        "sources": "depset of File: the modules, and files that they read.",
        "imports": "depset of string: import roots, relative to the folder that holds all repositories: " +
                   "\"stagec/compiler\".",
    },
)

PythonRulesInfo = provider(
    doc = "The providers in which other rule sets hand over Python code.",
    fields = {
        "providers": "list of provider, such as PyInfo: each has a field `imports`, as PythonSourcesInfo, and may have " +
                     "a field `transitive_sources`: a depset of File.",
    },
)

IsolationInfo = provider(
    doc = "What the system of this machine lets workers do.",
    fields = {"works": "bool: whether a worker can isolate its actions."},
)

StagecToolchainInfo = provider(
    doc = "What export, compile and bundle actions run.",
    fields = {
        "environment": "PythonEnvironmentInfo: the interpreter and the compiler's third-party packages.",
        "interpreter": "InterpreterInfo: what actions run instead of the environment's interpreter; None for most.",
        "entry": "File: the compiler's __main__.py.",
        "start": "File: the script that starts an interpreter by its path, or says that there is none.",
        "import_root": "string: the folder, relative to the execution root, that the compiler is imported from.",
        "inputs": "depset of File: all that a compiler process reads, besides what it works on.",
        "sources": "depset of File: the same without the packages.",
        "packages_are_inputs": "bool: whether actions have the packages as inputs.",
        "environment_tool": "FilesToRunProvider: what stands for the environment in the key of a worker.",
        "tools": "list of FilesToRunProvider: the others whose change starts a new worker.",
        "workers": "bool: whether Bazel may keep workers.",
    },
)

AotExportInfo = provider(
    doc = "One exported function.",
    fields = {
        "name": "string: <manifest>.<function>.",
        "exported": "File: the exported artifact, in the format of jax.export.",
        "lowered": "File: the modules that JAX lowers for the devices of the function's targets, if they differ; None if all " +
                   "targets are CPUs.",
        "plugin": "PythonEnvironmentInfo: what tracing needs besides the toolchain; None for most functions.",
        "extension": "struct: the extension that has the function's frontend, as extension_of returns it; None for most " +
                     "functions.",
        "description": "File: what it was made from, as JSON.",
        "profile": "File: the seconds that each phase of making it took, as JSON. No action reads it.",
        "spec": "File: the function's spec, as JSON.",
        "examined": "string: `examined` of its manifest.",
        "sources": "depset of File: what tracing imports and reads.",
        "looked": "struct of File: names and imports, what AotImportsInfo has of it; None where nobody read its imports.",
        "import_roots": "list of string: import roots, relative to the folder that holds all repositories.",
    },
)

AotImportsInfo = provider(
    doc = "What functions look for when they are imported.",
    fields = {
        "names": "File: the names of all files that they may read, one a line.",
        "looked": "dict of File by the names of exports: which names a function looks for, and what is there, as JSON.",
    },
)

AotExecutableInfo = provider(
    doc = "One function compiled for one target, and for one bucket of its symbolic dimensions if it has any.",
    fields = {
        "name": "string: `<manifest>.<function>.<target>[.<bucket>]`, and `.jaxlib-<release>` if another environment " +
                "compiles it.",
        "export": "string: the name of its AotExportInfo.",
        "executable": "File: the XLA executable.",
        "description": "File: what it takes, returns and costs, as JSON.",
        "module": "File: the StableHLO module that XLA compiled.",
        "inventory": "File: the program's arrays, operations, exchanges and limits, as JSON, for reports and baselines.",
        "hlo_proto": "File: the program after XLA optimized it, as HloModuleProto. Only tests of golden results read it.",
        "profile": "File: the seconds that each phase of making it took, as JSON. No action reads it.",
        "platform": "string: the target's platform: cpu, cuda, rocm or tpu.",
        "plugin": "PythonEnvironmentInfo: the compiler of the platform; None for cpu.",
        "environment": "PythonEnvironmentInfo: what compiled it instead of the toolchain's; None: the toolchain's.",
        "examined": "string: `examined` of its manifest.",
        "spec": "File: the executable's spec, as JSON.",
    },
)

AotGoldenInfo = provider(
    doc = "Golden inputs and outputs of one exported function.",
    fields = {
        "name": "string: the name of its AotExportInfo.",
        "golden": "File: the arrays, in a safetensors file.",
        "inputs": "list of File: the .npz file with the inputs; empty if they were generated.",
    },
)

AotBundleInfo = provider(
    doc = "The artifacts of one manifest in one file.",
    fields = {
        "name": "string: the manifest's name.",
        "version": "string: the manifest's version.",
        "bundle": "File: the .aot file.",
        "exports": "depset of AotExportInfo: the exported artifacts in it.",
        "executables": "depset of AotExecutableInfo: the executables in it.",
        "arrays": "depset of File: the files whose arrays are in it: weights, and golden inputs.",
        "weights": "list of File: the files of weights beside it.",
    },
)

AotJaxCacheInfo = provider(
    doc = "Entries of JAX's persistent compilation cache.",
    fields = {
        "folder": "File: the folder that JAX reads.",
        "layer": "File: the same folder in a .tar file.",
        "entries": "list of struct: an executable each, with its name, names (File: those that it has in the folder), executable " +
                   "(File), costs (File or None: what it takes), spec (File), key (File: what JAX looks it up by), platform, and " +
                   "plugin (PythonEnvironmentInfo or None).",
    },
)

AotProvenanceInfo = provider(
    doc = "What a bundle, or a layer with JAX's compilation cache, was built from.",
    fields = {
        "bundle": "File: the .aot file, or the .tar file of the layer.",
        "statement": "File: the in-toto statement with SLSA provenance, .intoto.json.",
        "sbom": "File: the CycloneDX SBOM of the toolchain, .sbom.json.",
    },
)
