"""The rivals, one file each, all with the interface of the raytraced layer: hidden vectors in, a LayerOutput out."""
