"""Object stores with put-if-absent: on disk, in the cloud, in memory."""
