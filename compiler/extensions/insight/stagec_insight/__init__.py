"""Pages, profiles, timelines, autotuning, and what compilers decided for devices, run on CPUs."""
