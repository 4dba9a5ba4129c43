"""Who decides: raytraced experts and their rivals, one file each, all for the same layer and the same grid of experts."""
