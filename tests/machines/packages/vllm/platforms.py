class current_platform:  # noqa: N801 - vLLM's name of an object
    device_name = device_type = "cuda"

    @staticmethod
    def import_kernels() -> None:
        """There are none."""
