from tests.model.tiers import native_kernels, tier  # noqa: F401 (fixtures)
