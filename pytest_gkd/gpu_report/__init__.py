"""What runs on GPUs: ``gkd gpu-report``, its files, and what page and header say."""
