"""The system beneath: control groups, NUMA nodes, files that last, the folder of the user, and sizes of memory."""
