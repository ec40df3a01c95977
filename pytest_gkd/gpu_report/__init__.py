"""Runs on GPUs: ``gkd gpu-report``, its files, and what the page and header say."""
