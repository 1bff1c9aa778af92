"""Times of sta::attention beside other attention kernels, in one process, after a check against the definition.

A user of the whole package: `python -m sta_compile bench`.
"""
