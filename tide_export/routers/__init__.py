"""What stands at a checkpoint (router and lens), and the file that holds all of them."""
