"""The benchmarks behind ``dshard bench``: one module each, with a ``run`` that measures, prints and writes.

Every one runs dshard interleaved with what it is compared to, in one run. Nothing here is imported before it is
asked for.
"""
