// Numbers in a readable form.

export const count = (value) => value.toLocaleString("en");

// "1 block", "2 blocks".
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
