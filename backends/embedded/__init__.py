"""The embedded engine: stock SGLang on a plain CPU, with tiny models made on the spot."""
