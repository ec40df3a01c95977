"""Model directories and tokenizers, found, checked, or made tiny."""
