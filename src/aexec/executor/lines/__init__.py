"""What backends share whose workers are processes with two lines each, whoever made the processes.

Nothing is imported here: a worker's process takes no more of it than ``environment``.
"""
