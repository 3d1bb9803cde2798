"""The word lists of records and settings; more names come from Faker."""

from __future__ import annotations


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Return the words of `text`, separated by white space or by `separator`."""
    return tuple(text.split(separator))


REFERENCE_WORDS = listed(
    "John Jane Alice Bob Carol Dave Emma Frank Grace Henry Irene Jack Karen Leo Mia Noah Olivia "
    "Peter Quinn Rachel Steve Tina Umar Victor Wendy Xavier Yara Zack Amy Ben Doe Smith Johnson "
    "Brown White Green Black Blue Yellow Violet Orange Indigo Red"
)
LOCALES = listed("en_US en_GB en_IN fr_FR de_DE es_ES it_IT nl_NL fi_FI")
ONSETS = listed("b br c ch d dr f fl g gr h j k kl l m n p ph qu r s sh st t th tr v w x y z")
VOWELS = listed("a e i o u a e i o ai ea ee io ou ya")
CODAS = listed("||||l|m|n|r|s|t|x|ck|ld|nd|nn|rd|rt|sh|th", "|")
JOBS = listed(
    "Engineer Doctor Teacher Artist Scientist Lawyer Musician Chef Nurse Pilot Baker Farmer "
    "Dentist Architect Plumber Writer Actor Judge Librarian Carpenter Mechanic Surgeon Tailor "
    "Designer Driver Editor Florist Gardener Barber Banker Chemist Clerk Dancer Diver Painter "
    "Photographer Physicist Programmer Sailor Singer Waiter Welder Analyst Biologist Butcher "
    "Cashier Economist Electrician Firefighter Historian Jeweller Journalist Linguist Optician "
    "Pharmacist Potter Ranger Reporter Sculptor Secretary Shepherd Soldier Translator Tutor"
)
COUNTRIES = listed(
    "USA|Canada|UK|Australia|New Zealand|Ireland|France|Germany|Spain|Italy|Portugal|Norway|"
    "Sweden|Finland|Denmark|Poland|Austria|Greece|Turkey|Egypt|Kenya|Nigeria|Ghana|Morocco|"
    "India|China|Japan|South Korea|Vietnam|Thailand|Malaysia|Singapore|Indonesia|Brazil|"
    "Argentina|Chile|Peru|Mexico|Cuba|Jamaica|South Africa|Iceland|Hungary|Romania|Croatia|"
    "Israel|Jordan|Nepal",
    "|",
)
STREETS = listed(
    "Elm Oak Pine Maple Birch Cedar Ash Spruce Fir Willow Poplar Alder Beech Hazel Holly Ivy "
    "Laurel Linden Juniper Rowan Walnut Chestnut Cherry Apple Rose Lily Park Lake Hill River "
    "Mill Church Bridge Station Market Castle School Garden King Queen Main High Spring Summer "
    "Winter Harbour"
)
STREET_ENDS = listed("St St St Ave Rd Lane Drive")
TOWNS = listed(
    "Springfield Toronto London Sydney Wellington Dublin Vancouver Manchester Melbourne "
    "Auckland Cork Boston Calgary Edinburgh Brisbane Hamilton Limerick Seattle Ottawa "
    "Birmingham Perth Christchurch Galway Denver Montreal Leeds Adelaide Waterford Paris Berlin "
    "Madrid Rome Lisbon Oslo Stockholm Helsinki Vienna Athens Cairo Nairobi Lagos Mumbai Delhi "
    "Tokyo Seoul Hanoi Bangkok Jakarta Lima Santiago Bogota Dallas Houston Phoenix Chicago "
    "Miami Atlanta Austin Portland Memphis Detroit Bristol Cardiff Glasgow Norwich Oxford "
    "Cambridge York Exeter"
)
REGIONS = listed(
    "IL ON UK NSW NZ IE NY BC VIC MA AB WA QLD SA CO QC CA TX FL OH GA NC MI NJ VA AZ TN MO MD "
    "WI MN OR KY LA CT UT NV FR DE ES IT SE NO FI"
)
THING_HEADS = listed(
    "door engine window gate server router printer garden kitchen boat train bridge tower cable "
    "pump valve motor battery screen signal ticket parcel report invoice project budget cache "
    "queue worker client backup storage library museum station harbour camera lamp oven"
)
THING_TAILS = listed(
    "code size speed limit name colour owner price weight length port level status version "
    "number key label rate count date model address region host mode path type timeout width "
    "height depth"
)
SETTING_WORDS = listed(
    "red blue green black white yellow silver golden purple orange fast slow high low open "
    "closed ready active idle warm cold north south east west local remote strict lazy eager "
    "square round"
)
