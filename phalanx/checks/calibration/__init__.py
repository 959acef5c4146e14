"""Times of the kernels and collectives that training runs, each alone, as `phalanx plan calibrate` wants them."""
