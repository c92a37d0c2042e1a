"""The data of the application, in rooms: fields, sources, years, checks, convert, sample; each says what it is for.

The commands prepare_era5, prepare_data, year_files and sample_data make data; dataset and year_data are the public
names of what training reads.
"""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
