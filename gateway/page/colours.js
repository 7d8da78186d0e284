// Colours of conversations in the map and the lists: those that run at the same time have different ones while there are enough.

const PALETTE = ["#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#ec4899", "#84cc16", "#a16207"];
const RUNNING = 1000; // a colour of a row that runs counts for so many of sessions that rest

/** What a row or a session has its colour by: a session keeps its own while it rests. */
export function ownerOf(row) {
  return row.session || row.id;
}

export class Colours {
  constructor() {
    this.taken = new Map(); // owner -> index in PALETTE
  }

  /** Give all owners of a view a colour, and take back those of owners that are gone. */
  take(view) {
    const owners = [...view.rows, ...view.queue, ...view.sessions].map(ownerOf);
    const there = new Set(owners);
    for (const owner of this.taken.keys()) if (!there.has(owner)) this.taken.delete(owner);
    const uses = PALETTE.map(() => 0);
    const running = new Set(view.rows.map(ownerOf));
    const weight = (owner) => (running.has(owner) ? RUNNING : 1);
    for (const [owner, index] of this.taken) uses[index] += weight(owner);
    for (const owner of owners) {
      if (this.taken.has(owner)) continue;
      const index = uses.indexOf(Math.min(...uses));
      uses[index] += weight(owner);
      this.taken.set(owner, index);
    }
  }

  of(owner) {
    return PALETTE[this.taken.get(owner) ?? 0];
  }
}
