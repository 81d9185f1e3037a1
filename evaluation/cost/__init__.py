"""Operations and bytes of a policy, counted before anything runs."""
