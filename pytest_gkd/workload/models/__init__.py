"""Model directories and tokenizers: located, checked, or generated tiny."""
