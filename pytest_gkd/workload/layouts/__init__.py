"""Where trainer, teacher and engine live."""
