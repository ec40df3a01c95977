__version__ = "2.13.0+cu129"
cuda: str | None = "12.9"
hip: str | None = None
