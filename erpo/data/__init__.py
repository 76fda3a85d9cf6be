"""Problems, made here or read from files, and the queries made of them."""
