"""Run the study; see `benchmarks.front.readings.study`."""

from benchmarks.front.readings.study import main

if __name__ == "__main__":
    main()
